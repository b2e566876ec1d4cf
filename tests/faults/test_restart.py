"""A worker that was told to stop and was started again takes work again, and everybody can see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.cluster import tiny_model
from tests.support.processes import Service, running
from twostroke.cli.probe import health
from twostroke.errors import Unavailable
from twostroke.rpc.channel import connect
from twostroke.v1 import kvstore_pb2, kvstore_pb2_grpc


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


async def test_after_everything_was_killed_a_prompt_is_found_on_disk(tmp_path: Path) -> None:
    prompt = tuple(number % 250 for number in range(400))
    how = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    disk = ("--disk-directory", str(tmp_path / "disk"), "--disk-bytes", str(16 << 20))
    model = tiny_model(tmp_path / "model")
    async with running(tmp_path, model, "--weights", "f32", store=disk) as whole:
        client = whole.clients[whole.lone]
        before = await client.complete(prompt, **how)
        assert before.usage.cached.total == 0
        await on_disk(whole.kvstore, blocks=400 // 16)
        for each in (whole.kvstore, *whole.prefill, *whole.decode):
            await each.kill()
        for each in (whole.kvstore, *whole.prefill, *whole.decode):
            await each.start()
        await health_is(whole.lone.address, True)
        await on_disk(whole.kvstore, blocks=400 // 16)
        after = await client.complete(prompt, **how)
        assert after.text == before.text
        assert after.usage.cached.store >= 400 - 16
        await whole.settled()


async def on_disk(store: Service, *, blocks: int) -> None:
    """Return once the store has so many blocks on disk."""
    channel = connect(store.address)
    stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
    async with asyncio.timeout(20):
        while (await stub.GetStatus(kvstore_pb2.GetStoreStatusRequest(), timeout=5)).disk.blocks < blocks:
            await asyncio.sleep(0.01)
    await channel.close()
