"""A worker that is stuck, not dead, holds nobody's answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.cluster import tiny_model
from tests.support.processes import running
from twostroke.types import Delta


async def test_the_streams_of_a_frozen_decode_worker_go_on_at_another(tmp_path: Path) -> None:
    how = {"max_tokens": 3_000, "temperature": 0.0, "ignore_eos": True}
    model = tiny_model(tmp_path / "model", layers=4)
    async with running(tmp_path, model, "--weights", "f32", "--lease-seconds", "1") as whole:
        client = whole.clients[whole.router]
        truth = await client.complete("hello", cache_salt="truth", **how)
        frozen = None
        text = ""
        # Far below the minute after which the transport would give the connection up by itself.
        async with asyncio.timeout(40):
            async for event in client.generate("hello", **how):
                if not isinstance(event, Delta):
                    continue
                text += event.text
                if frozen is None and event.total_tokens > 50:
                    workers = zip(whole.decode, (await client.status()).workers[2:], strict=True)
                    frozen = next((service for service, status in workers if status.load.running), None)
                    if frozen is not None:  # what a worker tells may be older than the stream
                        frozen.freeze()
        assert frozen is not None
        frozen.thaw()
        assert text == truth.text
        await whole.settled()
