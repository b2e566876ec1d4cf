"""`twostroke status`: how a cluster is, as a table."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from twostroke.cli.doors import add_door
from twostroke.cli.terminal import note, show, table
from twostroke.client import Client
from twostroke.cluster import Status, WorkerStatus
from twostroke.settings import Parser

HEADER = ("ADDRESS", "ROLE", "STATE", "RUNNING", "WAITING", "FREE PAGES", "STEPS")


def run(argv: Sequence[str]) -> int:
    """Run the verb: 0 when the cluster is ready, 1 when not."""
    parser = Parser(prog="twostroke status", description="Say how a cluster is; exit 0 when it is ready, 1 when not.")
    add_door(parser)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for an answer")
    told = parser.parse_known(argv)
    status = asyncio.run(ask(told.address, told.api_key, told.timeout))
    show(report(status))
    note("ready" if status.ready else f"not ready: {status.reason}")
    return 0 if status.ready else 1


async def ask(address: str, api_key: str | None, seconds: float) -> Status:
    """The router's own report. Raises TwostrokeError."""
    async with Client(address, api_key=api_key) as client:
        return await client.status(timeout=seconds)


def report(status: Status) -> str:
    """A line for each worker."""
    return table(HEADER, [worker_row(worker) for worker in status.workers])


def worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    """One worker, in the columns of HEADER."""
    if worker.info is None:
        return (worker.address, "-", "not reached", "-", "-", "-", "-")
    load = worker.load
    state = "draining" if load.draining else "available" if worker.available else "not available"
    room = f"{load.free_pages + load.evictable_pages} of {worker.info.pages}"
    return (worker.address, worker.info.role.value, state, str(load.running), str(load.waiting), room, str(load.steps))
