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
from services.kvstore.node import Node
from services.kvstore.service import KvStoreService
from services.kvstore.settings import KvStoreSettings
from twostroke.rpc.server import Server, serving, told_to_stop
from twostroke.telemetry import telemetry

log = logging.getLogger(__name__)


@asynccontextmanager
async def assembled(settings: KvStoreSettings) -> AsyncIterator[tuple[Server, Node]]:
    """Serve inside the block; leaving it drains and removes the arena."""
    directory = settings.store.arena_directory or default_directory()
    with open_arena(directory, secrets.token_hex(8), settings.store.arena_bytes) as arena:
        node = Node(arena, settings.store, settings.disk)
        watching = asyncio.create_task(node.watch(), name="expiry")
        watching.add_done_callback(_end_with)
        try:
            async with serving(settings.server, KvStoreService(node)) as server:
                node.address = settings.data.advertise or reachable(server.address)
                yield server, node
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            await node.close()


def reachable(address: str) -> str:
    """An address that was bound, as other hosts reach it: one that stands for all interfaces by this host's name."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in ("0.0.0.0", "::") else address


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
