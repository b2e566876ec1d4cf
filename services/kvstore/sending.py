"""One connection of the data plane: reads requests, checks them, sends blocks. It blocks: for a thread of its own.

A block goes out from the mapped arena by `sendmsg`, beside the trailer of the one before. Not by `sendfile`: that hands
pages of the arena to the socket, and a slot that is written anew would change what is still on its way; after `sendmsg`
the bytes are the socket's own, so a look at the slot's header (the reader's half of a seqlock) proves what was sent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

import xxhash

from services.kvstore.arena import Arena
from twostroke.errors import InvalidRequest, WorkerLost
from twostroke.kv import proof
from twostroke.kv.layout import ArenaLayout, SlotHeader
from twostroke.kv.transport import frames
from twostroke.kv.transport.frames import Code, Head, Names, Place, Status, Trailer
from twostroke.kv.transport.sockets import TimedSocket


class Source(Protocol):
    """Where blocks come from: one incarnation of a node."""

    arena: Arena
    layout: ArenaLayout

    def keeps(self, lease_id: str, key: bytes, generation: int, slot: int) -> bool:
        """Whether a lease keeps a block at this very place. Called from any thread."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Answers the requests of any number of connections, each in its own thread.

    Args:
        find: the blocks of an incarnation; raises WorkerLost for all but the living one. Called from any thread.
        key: that the node signs leases with.
        idle_seconds: how long a connection may be silent between requests.
        send_seconds: how long a peer may take to read a block, or to write the rest of a request.
    """

    find: Callable[[str], Source]
    key: bytes
    idle_seconds: float
    send_seconds: float

    def serve(self, connection: socket.socket) -> Code:
        """Answer requests until one is refused; answers why. The caller closes.

        Raises: OSError, when the peer leaves, is too slow or is silent for too long.
        """
        peer = TimedSocket(connection)
        peer.send([Status(Code.OK).pack()], self.send_seconds)
        data = memoryview(bytearray(frames.MAX_REQUEST_BYTES))
        while True:
            count = peer.receive_some(data, frames.HEAD_BYTES, self.idle_seconds)
            try:
                self._answer(peer, *self._request(peer, data, count))
            except _Refused as refused:
                peer.send([Status(refused.code).pack()], self.send_seconds)
                return refused.code

    def _request(self, peer: TimedSocket, data: memoryview, count: int) -> tuple[Source, Names, list[Place]]:
        """Read and check a request of which `count` bytes have come."""
        try:
            head = Head.unpack(data[: frames.HEAD_BYTES])
            if count > head.request_bytes:
                raise InvalidRequest("more than a request")
            if count < head.request_bytes:
                peer.receive([data[count : head.request_bytes]], self.send_seconds)
            names, places = head.rest(data[frames.HEAD_BYTES : head.request_bytes])
            source = self.find(names.incarnation)
        except InvalidRequest as error:
            raise _Refused(Code.MALFORMED) from error
        except WorkerLost as error:
            raise _Refused(Code.OTHER_LIFE) from error
        if not proof.verify(self.key, head.proof, **names._asdict()):
            raise _Refused(Code.UNPROVEN)
        return source, names, places

    def _answer(self, peer: TimedSocket, source: Source, names: Names, places: list[Place]) -> None:
        """Send the leading blocks that the lease keeps, each as long as it does."""
        if not source.keeps(names.lease_id, *places[0]):
            raise _Refused(Code.NOT_LEASED)
        note = Status(Code.OK, source.layout.block_bytes).pack()
        for place, after in zip_longest(places, places[1:]):
            with source.arena.block(source.layout, place.slot) as block:
                peer.send([note, block], self.send_seconds)
                header = _proven(source, place, block)
            follows = header is not None and after is not None and source.keeps(names.lease_id, *after)
            note = _trailer(header, follows)
            if not follows:
                break
        peer.send([note], self.send_seconds)


def _proven(source: Source, place: Place, block: memoryview) -> SlotHeader | None:
    """The slot's header with a checksum, if the slot held the block until now; None where it changed."""
    computed = None if source.layout.checksums else xxhash.xxh3_64_intdigest(block)
    header = source.arena.header(source.layout, place.slot)  # after all reading of the block
    if (header.key, header.generation) != (place.key, place.generation):
        return None
    return header if computed is None else replace(header, checksum=computed)


def _trailer(header: SlotHeader | None, follows: bool) -> bytes:
    if header is None:
        return Trailer(whole=False, follows=False, tokens=0, checksum=0).pack()
    return Trailer(whole=True, follows=follows, tokens=header.tokens, checksum=header.checksum or 0).pack()


class _Refused(Exception):
    """The connection ends with a code."""

    def __init__(self, code: Code) -> None:
        super().__init__(code)
        self.code = code
