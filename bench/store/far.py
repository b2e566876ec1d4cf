"""The other host, in a process of its own: a node with its data plane, and beside it a bare socket and a bare server.

    python -m bench.store.far HOST SECRET NODE DATA RAW BARE     what proofs are signed with, and four ports

The node's own port is the last to open: once it serves, all do.
"""

from __future__ import annotations

import asyncio
import mmap
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import uvloop

from bench.store.ground import BLOCK_BYTES, BLOCKS
from bench.store.others import RAW_REQUEST
from bench.store.ours import LEASE_SECONDS
from services.kvstore.arena import default_directory, open_arena
from services.kvstore.dataplane import serving_data
from services.kvstore.node import Node
from services.kvstore.sending import Sender
from services.kvstore.service import KvStoreService
from services.kvstore.settings import DataSettings, StoreSettings
from twostroke.heap import keep_freed_memory
from twostroke.kv import proof
from twostroke.rpc.interceptor import Context
from twostroke.rpc.server import ServerSettings, serving, told_to_stop
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import add_KvStoreServiceServicer_to_server

SLOTS = BLOCKS + 8


class Bare(KvStoreService):
    """Answers a lookup without looking, and without the border of our servers."""

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:  # noqa: ARG002
        """Say one."""
        return pb.LookupResponse(held=1)


@asynccontextmanager
async def bare(address: str, node: Node) -> AsyncIterator[None]:
    """Serve what grpc.aio costs by itself: no interceptor, no option."""
    server = grpc.aio.server()
    add_KvStoreServiceServicer_to_server(Bare(node), server)
    server.add_insecure_port(address)
    await server.start()
    yield
    await server.stop(None)


def send_raw(listener: socket.socket) -> None:
    """Serve one connection from a mapping, in a thread that ends with the process."""
    mapped = memoryview(mmap.mmap(-1, BLOCKS * BLOCK_BYTES))
    for start in range(0, len(mapped), BLOCK_BYTES):  # pages that nobody wrote are all the same one
        mapped[start : start + BLOCK_BYTES] = secrets.token_bytes(BLOCK_BYTES)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(RAW_REQUEST.size, socket.MSG_WAITALL):
        start, count = RAW_REQUEST.unpack(request)
        connection.sendall(mapped[start * BLOCK_BYTES : (start + count) * BLOCK_BYTES])


async def serve(host: str, secret: bytes, node_port: int, data_port: int, raw_port: int, bare_port: int) -> None:
    """Serve until told to stop."""
    listener = socket.create_server((host, raw_port))
    threading.Thread(target=send_raw, args=(listener,), daemon=True).start()
    size = 2 * mmap.PAGESIZE + SLOTS * (BLOCK_BYTES + 64)
    settings = StoreSettings(arena_bytes=size, max_lease_seconds=LEASE_SECONDS)
    server = ServerSettings(listen=f"{host}:{node_port}")
    with open_arena(default_directory(), secrets.token_hex(8), settings.arena_bytes) as arena:
        node = Node(arena, settings)
        sender = Sender(node.blocks, proof.node_key(node.incarnation, secret), LEASE_SECONDS, LEASE_SECONDS)
        data = DataSettings(data_listen=f"{host}:{data_port}")
        async with (
            bare(f"{host}:{bare_port}", node),
            serving_data(data, sender),
            serving(server, KvStoreService(node)) as served,
        ):
            node.address = served.address
            await told_to_stop(server)
        await node.close()


if __name__ == "__main__":
    keep_freed_memory()  # as a store's process does
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(sys.argv[1], sys.argv[2].encode(), *map(int, sys.argv[3:7])))
