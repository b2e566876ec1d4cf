"""A cluster's workers prepare the weights once, and every later start maps them."""

from pathlib import Path

from tests.support.launched import launched


async def test_the_workers_of_every_start_share_one_prepared_file(tmp_path: Path) -> None:
    weights, starts = tmp_path / "cache" / "weights", []
    for _ in range(2):
        async with launched(tmp_path, "--prefill", "2") as cluster:
            await cluster.ready()
        starts.append([(path.name, path.stat().st_ino) for path in weights.glob("*.safetensors*")])
    assert len(starts[0]) == 1
    assert starts[1] == starts[0]


async def test_a_cluster_may_keep_nothing(tmp_path: Path) -> None:
    async with launched(tmp_path, "--weights-cache", "off") as cluster:
        await cluster.ready()
    assert not (tmp_path / "cache").exists()
