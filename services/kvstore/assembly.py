"""The KV block store: assemble, serve, take apart."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.kvstore.arena import default_directory, open_arena
from services.kvstore.dataplane import serving_data
from services.kvstore.node import Node
from services.kvstore.others import Others
from services.kvstore.sending import Sender
from services.kvstore.service import KvStoreService
from services.kvstore.settings import KvStoreSettings
from twostroke.kv.refs import Offer
from twostroke.kv.transport import peer_streams
from twostroke.rpc.server import Server, serving, told_to_stop
from twostroke.telemetry import telemetry

log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::")


@asynccontextmanager
async def assembled(settings: KvStoreSettings) -> AsyncIterator[tuple[Server, Node]]:
    """Serve inside the block; leaving it drains and removes the arena."""
    directory = settings.store.arena_directory or default_directory()
    with open_arena(directory, secrets.token_hex(8), settings.store.arena_bytes) as arena:
        node = Node(arena, settings.store, settings.disk, Others(settings.peers, settings.directory))
        sender = Sender(node.blocks, node.key, settings.data.data_idle_seconds, settings.data.data_send_seconds)
        watching = asyncio.create_task(node.watch(), name="expiry")
        watching.add_done_callback(_end_with)
        try:
            async with (
                serving_data(settings.data, sender) as plane,
                serving(settings.server, KvStoreService(node)) as server,
            ):
                introduce(node, settings.data.advertise or reachable(server.address), plane.offer)
                yield server, node
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            await node.close()


def introduce(node: Node, address: str, data: Offer) -> None:
    """Tell a node where other hosts reach it, and how they may read its blocks: the gRPC door is always a way."""
    host, _, port = data.address.decode().rpartition(":")
    if host.strip("[]") in WILDCARDS:  # of the host that is advertised
        data = Offer(data.kind, f"{address.rpartition(':')[0]}:{port}".encode())
    offers = [data, Offer(peer_streams.KIND, address.encode())]
    if is_local(host) and not is_local(address.rpartition(":")[0]):
        log.info("no other host reaches the data plane; they read over gRPC", extra={"data": f"{host}:{port}"})
        del offers[0]
    node.offers = tuple(offers)
    node.address = address


def is_local(host: str) -> bool:
    """Whether a host names the machine that says it, whichever that is."""
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")


def reachable(address: str) -> str:
    """An address that was bound, as other hosts reach it: one that stands for all interfaces by this host's name."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in WILDCARDS else address


def _end_with(watching: asyncio.Task[None]) -> None:
    """Without expiry nothing would come back any more: better to end, and be started again."""
    if not watching.cancelled() and watching.exception() is not None:
        log.error("expiry failed", exc_info=watching.exception())
        os.kill(os.getpid(), signal.SIGTERM)


async def run(settings: KvStoreSettings) -> None:
    """Serve until told to stop, then drain."""
    with telemetry("kvstore", settings.telemetry):
        async with assembled(settings):
            await told_to_stop(settings.server)
