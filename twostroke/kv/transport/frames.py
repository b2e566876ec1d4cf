"""Frames of the TCP data plane: fixed, little-endian, length-limited. Bytes in, values out; no socket.

    source → reader   Status             when it connects: OK, or why not and the end
    reader → source   head, names, places    a request; any number, one after the other
    source → reader   Status             OK and the first block follows; or why not and the end
                      block, Trailer     the bytes of a block, what proves them whole, and whether another follows

After a trailer that says that the block changed, or that none follows, the request is answered: the rest are misses.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from twostroke.errors import InvalidRequest, NotFound, Overloaded, TwostrokeError, Unavailable, WorkerLost
from twostroke.kv.proof import PROOF_BYTES
from twostroke.kv.refs import BlockSlot

MAGIC = b"2stroke\x00"
VERSION = 1
MAX_PLACES = 4_096  # of one request
MAX_NAME_BYTES = 512  # of an incarnation, lease or namespace in UTF-8

_STATUS = struct.Struct("<8sHHQ")  # magic, version, code, bytes of a block
_HEAD = struct.Struct(f"<8sHHHHI{PROOF_BYTES}s")  # magic, version, three lengths, places, proof
_PLACE = struct.Struct("<16sQI")  # key, generation, slot
_TRAILER = struct.Struct("<??2xIQ")  # whole, whether a block follows, tokens, checksum

STATUS_BYTES, HEAD_BYTES, PLACE_BYTES, TRAILER_BYTES = _STATUS.size, _HEAD.size, _PLACE.size, _TRAILER.size
MAX_REQUEST_BYTES = HEAD_BYTES + 3 * MAX_NAME_BYTES + MAX_PLACES * PLACE_BYTES

Bytes = bytes | bytearray | memoryview


class Code(enum.IntEnum):
    """How a source answers; every one but OK ends the connection."""

    OK = 0
    BUSY = 1
    MALFORMED = 2
    OTHER_LIFE = 3
    UNPROVEN = 4
    NOT_LEASED = 5


_ERRORS: dict[Code, tuple[type[TwostrokeError], str, str | None]] = {
    Code.BUSY: (Overloaded, "the peer has no more connections", None),
    Code.MALFORMED: (InvalidRequest, "the peer does not understand the request", None),
    Code.OTHER_LIFE: (WorkerLost, "the peer's store has restarted and is empty; attach again", "incarnation"),
    Code.UNPROVEN: (InvalidRequest, "the peer does not take the proof", "proof"),
    Code.NOT_LEASED: (NotFound, "the lease has ended, or does not keep the block", "lease_id"),
}


def refusal(code: Code) -> TwostrokeError:
    """What a code other than OK means to the reader."""
    kind, message, field = _ERRORS[code]
    return kind(message, field=field)


@dataclass(frozen=True, slots=True)
class Status:
    """Opens a connection, and each answer."""

    code: Code
    block_bytes: int = 0

    def pack(self) -> bytes:
        """Its STATUS_BYTES."""
        return _STATUS.pack(MAGIC, VERSION, self.code, self.block_bytes)

    @classmethod
    def unpack(cls, data: Bytes) -> Status:
        """Read one. Raises Unavailable for what no source of this version sends."""
        magic, version, code, block_bytes = _STATUS.unpack(data)
        if (magic, version) != (MAGIC, VERSION) or code not in _CODES:
            raise Unavailable("what answers is no data plane of this version")
        return cls(Code(code), block_bytes)


_CODES = frozenset(Code)


class Place(NamedTuple):
    """A block that is asked for, and where it lies."""

    key: bytes
    generation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Head:
    """The start of a request, and what is to be read after it."""

    name_bytes: tuple[int, int, int]
    places: int
    proof: bytes

    @property
    def request_bytes(self) -> int:
        """Of the whole request."""
        return HEAD_BYTES + sum(self.name_bytes) + self.places * PLACE_BYTES

    @classmethod
    def unpack(cls, data: Bytes) -> Head:
        """Read HEAD_BYTES. Raises InvalidRequest for another protocol, and for lengths beyond the limits."""
        magic, version, *name_bytes, places, proof = _HEAD.unpack(data)
        if (magic, version) != (MAGIC, VERSION):
            raise InvalidRequest("not a request of this version")
        if max(name_bytes) > MAX_NAME_BYTES or not 1 <= places <= MAX_PLACES:
            raise InvalidRequest("a length beyond the limits")
        incarnation, lease_id, namespace = name_bytes
        return cls((incarnation, lease_id, namespace), places, proof)

    def rest(self, data: Bytes) -> tuple[Names, list[Place]]:
        """Read what comes after the head. Raises InvalidRequest for a name that is no text."""
        ends = list(accumulate(self.name_bytes, initial=0))
        try:
            names = Names(*(str(data[start:end], "utf-8") for start, end in pairwise(ends)))
        except UnicodeDecodeError as error:
            raise InvalidRequest("a name is not UTF-8") from error
        return names, list(map(Place._make, _PLACE.iter_unpack(data[ends[-1] :])))


class Names(NamedTuple):
    """Whose blocks are asked for."""

    incarnation: str
    lease_id: str
    namespace: str


def request(names: Names, proof: bytes, blocks: Sequence[BlockSlot]) -> bytes:
    """Ask for blocks. Raises InvalidRequest for what no frame can hold."""
    encoded = [name.encode() for name in names]
    if max(map(len, encoded)) > MAX_NAME_BYTES or not 1 <= len(blocks) <= MAX_PLACES or len(proof) != PROOF_BYTES:
        raise InvalidRequest(f"a request names 1 to {MAX_PLACES} blocks, and a lease with its proof", field="blocks")
    head = _HEAD.pack(MAGIC, VERSION, *map(len, encoded), len(blocks), proof)
    try:
        named = [_PLACE.pack(each.block.key, each.block.generation, each.slot) for each in blocks]
    except struct.error as error:
        raise InvalidRequest("a block's place is out of range", field="blocks") from error
    return b"".join((head, *encoded, *named))


class Trailer(NamedTuple):
    """Closes a block."""

    whole: bool  # the slot held the block to the end
    follows: bool
    tokens: int
    checksum: int  # xxh3-64 of the block's bytes

    def pack(self) -> bytes:
        """Its TRAILER_BYTES."""
        return _TRAILER.pack(*self)

    @classmethod
    def unpack(cls, data: Bytes) -> Trailer:
        """Read one."""
        return cls._make(_TRAILER.unpack(data))
