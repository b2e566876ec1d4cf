"""The KV store's contract: protobuf and domain types, both ways. Reading checks; it raises InvalidRequest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.duration_pb2 import Duration

from twostroke.errors import InvalidRequest
from twostroke.kv.layout import ArenaLayout, Attachment
from twostroke.kv.refs import BlockRef, BlockSlot, Lease, Offer, Reservation, Terms
from twostroke.limits import MAX_NAME_CHARACTERS
from twostroke.v1 import common_pb2, kvstore_pb2
from twostroke.wire import check_lease_id, duration_pb, lease, seconds

PIECE_BYTES = 1 << 20  # of a block, in one message of Read and Write
MAX_ADDRESS_CHARACTERS = 300  # host:port
_WRITER = re.compile(r"[0-9A-Za-z-]{1,64}")


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """A copied block that its writer wants published."""

    place: BlockSlot
    checksum: int | None


def writer_id(raw: str) -> str:
    """Read a writer's name, which becomes part of a file name."""
    if not _WRITER.fullmatch(raw):
        raise InvalidRequest("writer_id must be 1 to 64 letters, digits or dashes", field="writer_id")
    return raw


def lease_seconds(message: Duration) -> float:
    """Read how long a lease shall live."""
    value = seconds(message)
    if value <= 0:
        raise InvalidRequest("lease_duration must be over 0", field="lease_duration")
    return value


def duration_seconds(message: Duration, field: str) -> float:
    """Read a time that may be 0."""
    value = seconds(message)
    if value < 0:
        raise InvalidRequest(f"{field} must not be negative", field=field)
    return value


def namespace(raw: str) -> str:
    """Read the name of a namespace."""
    if len(raw) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"namespace has at most {MAX_NAME_CHARACTERS} characters", field="namespace")
    return raw


def source(message: common_pb2.Lease) -> Lease:
    """Read a lease at another node that has it open."""
    check_lease_id(message.id)
    named = message.store_incarnation and message.store_address
    if not named or max(len(message.store_incarnation), len(message.store_address)) > MAX_ADDRESS_CHARACTERS:
        raise InvalidRequest("a source names the store that keeps it, and where that is", field="source")
    return lease(message)


def terms(message: kvstore_pb2.ReserveRequest | kvstore_pb2.WriteRequest) -> Terms:
    """Read how blocks shall be held."""
    return Terms(namespace=namespace(message.namespace), transient=message.transient)


def block_ref(message: common_pb2.BlockRef) -> BlockRef:
    """Read a block's name."""
    return BlockRef(message.key, message.generation, message.tokens)


def block_ref_pb(value: BlockRef) -> common_pb2.BlockRef:
    """Write a block's name."""
    return common_pb2.BlockRef(key=value.key, generation=value.generation, tokens=value.tokens)


def block_slots(messages: Iterable[kvstore_pb2.BlockSlot]) -> tuple[BlockSlot, ...]:
    """Read blocks and where they lie."""
    return tuple(BlockSlot(block_ref(each.block), each.slot) for each in messages)


def block_slots_pb(values: Iterable[BlockSlot]) -> list[kvstore_pb2.BlockSlot]:
    """Write blocks and where they lie."""
    return [kvstore_pb2.BlockSlot(block=block_ref_pb(each.block), slot=each.slot) for each in values]


def reservations(messages: Iterable[kvstore_pb2.BlockSlot]) -> tuple[Reservation, ...]:
    """Read slots to be written; they hold no tokens yet."""
    return tuple(Reservation(each.block.key, each.block.generation, each.slot) for each in messages)


def reservations_pb(values: Iterable[Reservation]) -> list[kvstore_pb2.BlockSlot]:
    """Write slots to be written."""
    return [
        kvstore_pb2.BlockSlot(block=common_pb2.BlockRef(key=each.key, generation=each.generation), slot=each.slot)
        for each in values
    ]


def written_blocks(messages: Sequence[kvstore_pb2.WrittenBlock], *, block_tokens: int) -> tuple[WrittenBlock, ...]:
    """Read blocks to be published."""
    for each in messages:
        check_tokens(each.block.tokens, block_tokens)
    return tuple(
        WrittenBlock(BlockSlot(block_ref(each.block), each.slot), each.checksum if each.HasField("checksum") else None)
        for each in messages
    )


def written_blocks_pb(values: Iterable[WrittenBlock]) -> list[kvstore_pb2.WrittenBlock]:
    """Write blocks to be published."""
    return [
        kvstore_pb2.WrittenBlock(block=block_ref_pb(each.place.block), slot=each.place.slot, checksum=each.checksum)
        for each in values
    ]


def check_tokens(tokens: int, block_tokens: int) -> None:
    """Raise InvalidRequest unless a block can hold so many tokens."""
    if not 1 <= tokens <= block_tokens:
        raise InvalidRequest(f"tokens must be from 1 to {block_tokens}, not {tokens}", field="tokens")


def granted(lease: Lease, duration: Duration, node: Attachment) -> Lease:
    """Read for how long the node that answered keeps a lease open."""
    return Lease(id=lease.id, seconds=seconds(duration), incarnation=node.incarnation, address=node.address)


def attachment(message: kvstore_pb2.AttachResponse, writer_id: str) -> Attachment:
    """Read what the node told a worker that introduced itself as `writer_id`."""
    arena = message.arena
    layout = ArenaLayout(
        path=Path(arena.path),
        file_bytes=arena.file_bytes,
        slots=arena.slots,
        headers_offset=arena.headers_offset,
        header_bytes=arena.header_bytes,
        blocks_offset=arena.blocks_offset,
        block_bytes=arena.block_bytes,
        block_stride=arena.block_stride,
        checksums=arena.checksums,
    )
    return Attachment(
        incarnation=message.incarnation,
        writer_id=writer_id,
        layout=layout,
        max_keys=message.max_keys,
        max_lease_seconds=seconds(message.max_lease),
        address=message.address,
        offers=offers(message.offers),
    )


def attachment_pb(value: Attachment) -> kvstore_pb2.AttachResponse:
    """Write what the node tells a worker."""
    layout = value.layout
    arena = kvstore_pb2.Arena(
        path=str(layout.path),
        file_bytes=layout.file_bytes,
        slots=layout.slots,
        headers_offset=layout.headers_offset,
        header_bytes=layout.header_bytes,
        blocks_offset=layout.blocks_offset,
        block_bytes=layout.block_bytes,
        block_stride=layout.block_stride,
        checksums=layout.checksums,
    )
    return kvstore_pb2.AttachResponse(
        incarnation=value.incarnation,
        arena=arena,
        max_keys=value.max_keys,
        max_lease=duration_pb(value.max_lease_seconds),
        address=value.address,
        offers=offers_pb(value.offers),
    )


def offers(messages: Iterable[kvstore_pb2.Offer]) -> tuple[Offer, ...]:
    """Read the ways to a node's blocks."""
    return tuple(Offer(each.kind, each.address) for each in messages)


def offers_pb(values: Iterable[Offer]) -> list[kvstore_pb2.Offer]:
    """Write the ways to a node's blocks."""
    return [kvstore_pb2.Offer(kind=each.kind, address=each.address) for each in values]
