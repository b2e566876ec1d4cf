"""A worker that was told to stop and was started again takes work again, and everybody can see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.cluster import tiny_model
from tests.support.processes import running
from twostroke.cli.probe import health
from twostroke.errors import Unavailable


async def health_is(address: str, wanted: bool) -> None:
    """Return once the service's health is as wanted."""
    async with asyncio.timeout(20):
        while True:
            try:
                await health(address, 5.0)
                well = True
            except Unavailable:
                well = False
            if well is wanted:
                return
            await asyncio.sleep(0.02)


async def test_the_only_decode_worker_is_drained_and_started_again(tmp_path: Path) -> None:
    async with running(tmp_path, tiny_model(tmp_path / "model"), "--weights", "f32") as whole:
        client = whole.clients[whole.lone]
        before = await client.complete("hello", max_tokens=8, temperature=0.0, ignore_eos=True)
        await health_is(whole.lone.address, True)
        whole.decode[0].terminate()
        assert await whole.decode[0].ended() == 0
        await health_is(whole.lone.address, False)
        waiting = asyncio.create_task(client.complete("hello", max_tokens=8, temperature=0.0, ignore_eos=True))
        await whole.decode[0].start()
        assert (await waiting).text == before.text
        await health_is(whole.lone.address, True)
        assert (await client.status()).ready
        await whole.settled()
