"""Blocks as streams of pieces, for workers that cannot map the arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from services.kvstore.blocks import Blocks
from twostroke.errors import InvalidRequest
from twostroke.kv.messages import PIECE_BYTES, WrittenBlock
from twostroke.kv.refs import BlockRef, Lease, Reservation, Terms
from twostroke.wire import check_keys


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one block, in order. `last` comes with the block's final piece."""

    index: int  # which key of the request
    data: bytes
    last: Seal | None


@dataclass(frozen=True, slots=True)
class Seal:
    """What proves a streamed block whole."""

    checksum: int  # xxh3-64 of the block bytes
    tokens: int


def outgoing(blocks: Blocks, lease_id: str, keys: Sequence[bytes]) -> Iterator[Piece]:
    """Cut leased blocks into pieces, each only while the lease still keeps its block; ends early where it does not."""
    arena, layout = blocks.arena, blocks.layout
    for index, key in enumerate(keys):
        for offset in range(0, layout.block_bytes, PIECE_BYTES):
            place = blocks.leased(lease_id, key)
            if place is None:
                return
            data = arena.read(layout, place.slot, offset, PIECE_BYTES)
            whole = offset + len(data) == layout.block_bytes
            seal = Seal(arena.checksum(layout, place.slot), place.block.tokens) if whole else None
            yield Piece(index, data, seal)


@contextmanager
def receiving(blocks: Blocks, lease: Lease, terms: Terms, max_blocks: int, *, opened: bool) -> Iterator[Incoming]:
    """Take blocks under a lease; one that was opened for this ends again when the stream fails."""
    incoming = Incoming(blocks, lease, terms, max_blocks)
    try:
        yield incoming
    except BaseException:
        if opened:
            blocks.release([lease.id])
        raise
    finally:
        incoming.close()


class Incoming:
    """Puts pieces together, one block after the other, and commits each that is whole.

    The node itself is the writer: its copies end with each call of `take`, and `close` gives back a slot whose block
    did not become whole.
    """

    def __init__(self, blocks: Blocks, lease: Lease, terms: Terms, max_blocks: int) -> None:
        self.lease = lease
        self.committed: list[BlockRef] = []
        self.writing: list[bytes] = []  # left to another writer
        self._blocks = blocks
        self._terms = terms
        self._left = max_blocks
        self._open: _OpenBlock | None = None

    def take(self, key: bytes, data: bytes, seal: Seal | None) -> None:
        """Add a piece; a key starts a block and a seal ends it.

        Raises: InvalidRequest, when pieces are out of order, too large or too many, or the checksum is wrong.
        """
        if len(data) > PIECE_BYTES:
            raise InvalidRequest(f"a piece has at most {PIECE_BYTES} bytes", field="data")
        if bool(key) == bool(self._open):
            raise InvalidRequest(
                "a key comes with the first piece of a block, after the block before is whole", field="key"
            )
        block = self._open or self._begin(key)
        block.extend(data, self._blocks)
        if seal:
            self._finish(block, seal)

    def end(self) -> None:
        """Take the end of the stream. Raises InvalidRequest inside a block: a caller that left looks just like that."""
        if self._open:
            raise InvalidRequest("the stream ended inside a block", field="data")

    def close(self) -> None:
        """Give back what is not whole."""
        if self._open and self._open.reservation:
            self._blocks.abandon([self._open.reservation])
        self._open = None

    def _begin(self, key: bytes) -> _OpenBlock:
        if not self._left:
            raise InvalidRequest("too many blocks in one call", field="key")
        check_keys([key], 1, field="key")
        self._left -= 1
        reserved = self._blocks.reserve(self.lease, self._blocks.arena.incarnation, [key], self._terms)
        self.committed += [place.block for place in reserved.held]
        self.writing += reserved.writing
        self._open = _OpenBlock(next(iter(reserved.slots), None))
        return self._open

    def _finish(self, block: _OpenBlock, seal: Seal) -> None:
        if block.filled != self._blocks.layout.block_bytes or block.digest.intdigest() != seal.checksum:
            raise InvalidRequest("the block is not whole: its size or checksum is wrong", field="checksum")
        if block.reservation:
            written = WrittenBlock(block.reservation.written(seal.tokens), seal.checksum)
            self.committed += self._blocks.commit(self.lease.id, [written])
        self._open = None


class _OpenBlock:
    """A block that is arriving; without a reservation its bytes are dropped."""

    def __init__(self, reservation: Reservation | None) -> None:
        self.reservation = reservation
        self.digest = xxhash.xxh3_64()
        self.filled = 0

    def extend(self, data: bytes, blocks: Blocks) -> None:
        if self.filled + len(data) > blocks.layout.block_bytes:
            raise InvalidRequest("more bytes than a block has", field="data")
        if self.reservation:
            blocks.arena.write(blocks.layout, self.reservation.slot, self.filled, data)
        self.digest.update(data)
        self.filled += len(data)
