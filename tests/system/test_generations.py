"""Two generations of a model beside each other, as during an upgrade."""

from __future__ import annotations

from pathlib import Path

from services.kvstore.directory.settings import DirectorySettings
from services.kvstore.settings import DiskSettings
from services.kvstore.status import status_pb
from tests.support.alone import Alone
from tests.support.cluster import Cluster, Shape, started, tiny_model
from tests.support.redis import redis_server
from tests.support.stores import eventually
from twostroke.types import SamplingParams, StopConditions

PROMPT = tuple(n % 250 for n in range(200))
GREEDY, STOPS = SamplingParams(temperature=0.0), StopConditions(max_tokens=24, ignore_eos=True)


async def test_two_generations_share_folders_and_directory_and_nothing_else(tmp_path: Path) -> None:
    """Same host, same arena folder, same disk folder, same Redis, same prompt."""
    old, new = (tiny_model(tmp_path / f"generation-{seed}", seed=seed) for seed in (1, 2))
    with redis_server(tmp_path) as redis:
        redis.start()
        disk = DiskSettings(disk_directory=tmp_path / "disk", disk_bytes=8 << 20)
        told = {"disk": disk, "directory": DirectorySettings(redis_url=redis.url)}
        async with (
            Alone.started(old) as alone_old,
            Alone.started(new) as alone_new,
            started(Shape(model=old, **told)) as before,
            started(Shape(model=new, **told)) as after,
        ):
            truths = [(await alone.answer(PROMPT, GREEDY, STOPS))[0].ids for alone in (alone_old, alone_new)]
            assert truths[0] != truths[1]
            for _ in range(2):
                for cluster, truth in zip((before, after), truths, strict=True):
                    assert await asked(cluster) == truth
            for cluster in (before, after):
                await eventually(lambda node=cluster.node: status_pb(node).directory.held > 0)
                await eventually(lambda node=cluster.node: status_pb(node).directory.waiting == 0)
                told_of = status_pb(cluster.node)
                assert (told_of.directory.nodes, told_of.peers.fetched) == (0, 0)
        formats = {path.name for path in (tmp_path / "disk").iterdir() if path.is_dir()}
        assert len(formats) == 2


async def asked(cluster: Cluster) -> tuple[int, ...]:
    answer = await cluster.client.complete(PROMPT, max_tokens=24, temperature=0.0, ignore_eos=True)
    return tuple(token.id for token in answer.tokens)
