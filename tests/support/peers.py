"""Nodes whose blocks others read: a real store with its data plane, and a relay that meddles with what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.kvstore.dataplane import DataPlane, serving_data
from services.kvstore.sending import Sender
from services.kvstore.settings import DataSettings
from tests.support.stores import KV_FORMAT, WAIT_SECONDS, Store, key, pages, serving_store
from twostroke.kv import proof
from twostroke.kv.format import KvFormat
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import BlockSlot, Lease, Offer
from twostroke.kv.transport import frames
from twostroke.kv.transport.frames import Names
from twostroke.kv.transport.peer import Grant
from twostroke.kv.transport.tcp import TcpLimits, TcpTransport

LARGE = dataclasses.replace(KV_FORMAT, head_dim=1 << 16)  # 8 MiB a block: more than sockets buffer
NAMESPACE = "tenant"


@dataclass
class Source:
    """A node that gives blocks away."""

    store: Store
    plane: DataPlane
    key: bytes

    @property
    def block_bytes(self) -> int:
        return self.store.blocks.layout.block_bytes

    @property
    def streams(self) -> Offer:
        """The same blocks over gRPC."""
        return Offer("grpc", self.store.address.encode())

    def holding(self, *names: int, tokens: int = 16) -> tuple[Grant, list[BlockSlot]]:
        """Store blocks (`content`), unless they are, and lease them to a reader."""
        blocks, keys = self.store.blocks, [key(name) for name in names]
        lease = blocks.lease(Lease.named(10.0).id, 10.0, opens=True)
        content = dict(zip(keys, self.content(len(names)), strict=True))
        for each in blocks.reserve(lease, blocks.arena.incarnation, keys).slots:
            blocks.arena.write(blocks.layout, each.slot, 0, content[each.key])
            checksum = blocks.arena.checksum(blocks.layout, each.slot) if blocks.layout.checksums else None
            blocks.commit(lease.id, [WrittenBlock(each.written(tokens), checksum)])
        signed = proof.sign(self.key, incarnation=lease.incarnation, lease_id=lease.id, namespace=NAMESPACE)
        return Grant(lease, NAMESPACE, signed), blocks.acquire(lease, keys)

    def content(self, count: int) -> list[bytes]:
        """What `holding` stored."""
        return [row.tobytes() for row in pages(count, self.store.node.format or KV_FORMAT)]

    def memory(self, count: int) -> list[memoryview]:
        """Room for blocks."""
        return [memoryview(bytearray(self.block_bytes)) for _ in range(count)]

    def reuse(self, grant: Grant, name: int) -> None:
        """End the lease and give every slot to another block."""
        blocks = self.store.blocks
        blocks.release([grant.lease.id])
        wanted = [key(name + each) for each in range(blocks.layout.slots)]
        taken = blocks.reserve(blocks.lease(Lease.named(10.0).id, 10.0, opens=True), blocks.arena.incarnation, wanted)
        assert len(taken.slots) == blocks.layout.slots


@asynccontextmanager
async def sourcing(
    folder: Path, *, kv_format: KvFormat = KV_FORMAT, slots: int = 16, checksums: bool = False, **told: object
) -> AsyncIterator[Source]:
    """Serve a node and its data plane; `told` as in DataSettings, without the prefix."""
    settings = DataSettings(**{f"data_{name}": value for name, value in told.items()})  # type: ignore[arg-type]
    async with serving_store(folder, kv_format=kv_format, slots=slots, checksums=checksums) as store:
        store.node.attach(kv_format, "")
        key = proof.node_key(store.node.incarnation)
        sender = Sender(store.node.blocks, key, settings.data_idle_seconds, settings.data_send_seconds)
        async with serving_data(settings, sender) as plane:
            yield Source(store, plane, key)


@asynccontextmanager
async def reading(offer: Offer, **limits: object) -> AsyncIterator[TcpTransport]:
    """Read over TCP; `limits` as in TcpLimits."""
    transport = TcpTransport(offer, TcpLimits(**limits))  # type: ignore[arg-type]
    try:
        yield transport
    finally:
        await transport.close()


def asked(grant: Grant, blocks: Sequence[BlockSlot]) -> bytes:
    """The request of a reader."""
    names = Names(grant.lease.incarnation, grant.lease.id, grant.namespace)
    return frames.request(names, grant.proof, blocks)


class Relay:
    """Passes bytes on between one reader after the other and a source.

    What the source sends is held back from byte `hold_at` of a connection on, until `go` is set; byte `flip_at` is
    changed.
    """

    def __init__(
        self, listener: socket.socket, source: tuple[str, int], hold_at: int | None, flip_at: int | None
    ) -> None:
        self.offer = Offer("tcp", "{}:{}".format(*listener.getsockname()).encode())
        self.held, self.go = threading.Event(), threading.Event()
        self._listener, self._source = listener, source
        self._hold_at, self._flip_at = hold_at, flip_at
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def run(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:  # shut: the test is over
                return
            source = socket.create_connection(self._source)
            self._sockets += [reader, source]
            for work in (self._requests, self._answers):
                self._threads.append(threading.Thread(target=work, args=(reader, source)))
                self._threads[-1].start()

    def join(self) -> None:
        for each in self._sockets:
            shut(each)
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
        for each in self._sockets:
            each.close()

    def _requests(self, reader: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := reader.recv(1 << 16):
                source.sendall(data)
        self.go.set()  # nobody waits any more
        shut(source)

    def _answers(self, reader: socket.socket, source: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(self._most(passed))):
                if self._flip_at is not None and 0 <= self._flip_at - passed < len(data):
                    data[self._flip_at - passed] ^= 1
                reader.sendall(data)
                passed += len(data)
                if passed == self._hold_at:
                    self.held.set()
                    self.go.wait(WAIT_SECONDS)
        shut(reader)
        source.close()  # with bytes that were not read: a source that still sends learns of it

    def _most(self, passed: int) -> int:
        if self._hold_at is not None and passed < self._hold_at:
            return min(1 << 16, self._hold_at - passed)
        return 1 << 16


@contextmanager
def relayed(offer: Offer, *, hold_at: int | None = None, flip_at: int | None = None) -> Iterator[Relay]:
    """A relay before the data plane of an offer."""
    host, _, port = offer.address.decode().rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener, (host, int(port)), hold_at, flip_at)
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            yield relay
        finally:
            relay.go.set()
            shut(listener)
            thread.join(WAIT_SECONDS)
            relay.join()


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def block_ends(block_bytes: int, index: int) -> int:
    """How many bytes of a connection have passed when block `index` of its first request is whole."""
    start = 2 * frames.STATUS_BYTES  # the greeting, and the answer's own
    return start + (index + 1) * (block_bytes + frames.TRAILER_BYTES)
