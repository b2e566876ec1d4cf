"""The KV block store: assemble, serve, take apart."""

from __future__ import annotations

import asyncio
import secrets

import uvloop

from services.kvstore.arena import default_directory, open_arena
from services.kvstore.node import Node
from services.kvstore.service import KvStoreService
from services.kvstore.settings import KvStoreSettings
from twostroke.rpc.process import exit_code
from twostroke.rpc.server import serving, told_to_stop
from twostroke.settings import load_or_exit
from twostroke.telemetry import telemetry


async def run(settings: KvStoreSettings) -> None:
    """Serve until told to stop, then drain."""
    directory = settings.store.arena_directory or default_directory()
    with (
        telemetry("kvstore", settings.telemetry),
        open_arena(directory, secrets.token_hex(8), settings.store.arena_bytes) as arena,
    ):
        node = Node(arena, settings.store)
        watching = asyncio.create_task(node.watch(), name="expiry")
        async with serving(settings.server, KvStoreService(node)):
            stopping = asyncio.create_task(told_to_stop(settings.server), name="told to stop")
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        watching.cancel()
        await asyncio.wait({watching})
        if not watching.cancelled():
            watching.result()  # expiry never ends by itself: this raises


def main() -> int:
    """Run the service; answers the exit code of the process."""
    settings = load_or_exit(KvStoreSettings, prog="twostroke-kvstore")
    return exit_code(lambda: uvloop.run(run(settings)))


if __name__ == "__main__":
    raise SystemExit(main())
