"""The folder of prepared weights: a changed model never hits, one worker prepares for all, trouble costs only time."""

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.tiny import write_tiny
from twostroke.engine.backend import Linear
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.loading.digests import weights_digest
from twostroke.engine.loading.draft import Draft
from twostroke.engine.loading.prepared import PreparedFile
from twostroke.engine.loading.shelf import WeightsCache
from twostroke.engine.matrix import Matrix
from twostroke.engine.weights import LoadedModel, WeightMode, load_model
from twostroke.errors import ModelError
from twostroke.folders import cache_folder

TOKENS = list(b"a tiny prompt")
WITHOUT = "weights are loaded without a cache"
PREPARED = "weights were prepared for later starts"


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(folder=tmp_path / "cache" / "weights", settle_seconds=0)


def load(path: Path, cache: WeightsCache | None) -> LoadedModel:
    return load_model(path, mode=WeightMode.F16, backend=CPU, cache=cache)


def logits(path: Path, cache: WeightsCache | None = None) -> Tensor:
    return all_logits(load(path, cache), TOKENS)


def prepared(cache: WeightsCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir() if ".safetensors" in path.name}


def entries(cache: WeightsCache) -> list[Path]:
    return list(cache.folder.glob("*.digest"))


def why(caplog: pytest.LogCaptureFixture, message: str) -> list[str]:
    return [str(getattr(each, "why", "")) for each in caplog.records if each.getMessage() == message]


# Which values


def overwrite(own: Path, other: Path) -> None:
    """Write other bytes into the same file."""
    with own.open("r+b") as file:
        file.write(other.read_bytes())


def replace(own: Path, other: Path) -> None:
    other.replace(own)


@pytest.mark.parametrize("change", [overwrite, replace])
def test_a_changed_model_of_the_same_size_and_time_is_not_mistaken_for_the_old_one(
    tmp_path: Path, cache: WeightsCache, change: Callable[[Path, Path], None]
) -> None:
    folder, other = write_tiny(tmp_path / "model"), write_tiny(tmp_path / "other", seed=1)
    expected, old = logits(other), load(folder, cache)
    path = folder / "model.safetensors"
    before = path.stat()
    change(path, other / "model.safetensors")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    new = load(folder, cache)
    assert new.weights_digest == weights_digest(new.config, [path]) != old.weights_digest
    assert torch.equal(all_logits(new, TOKENS), expected)


def test_a_model_reached_by_another_path_hits_by_its_content(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    load(write_tiny(tmp_path / "model"), cache)
    with caplog.at_level(logging.INFO):
        load(write_tiny(tmp_path / "copy"), cache)
    assert PREPARED not in caplog.text
    assert len(prepared(cache)) == 1
    assert len(entries(cache)) == 2


def test_another_arithmetic_over_the_same_files_is_another_model(tmp_path: Path, cache: WeightsCache) -> None:
    folder = write_tiny(tmp_path / "model")
    first = load(folder, cache).weights_digest
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert load(folder, cache).weights_digest != first
    assert len(prepared(cache)) == 2


def test_a_model_written_a_moment_ago_is_read_again_at_each_start(tmp_path: Path, cache: WeightsCache) -> None:
    patient = WeightsCache(folder=cache.folder, settle_seconds=3_600)
    load(write_tiny(tmp_path / "model"), patient)
    assert not entries(cache)


class Meddler(TorchBackend):
    """Writes to the model's file while it is loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__(packs=False)
        self._path = path

    def linear(self, matrix: Matrix) -> Linear:
        os.utime(self._path)
        return super().linear(matrix)


@pytest.mark.parametrize("cached", [True, False])
def test_a_model_that_changes_while_it_is_loaded_is_refused(tmp_path: Path, cache: WeightsCache, cached: bool) -> None:
    folder = write_tiny(tmp_path / "model")
    with pytest.raises(ModelError, match="model changed while it was loaded"):
        load_model(
            folder,
            mode=WeightMode.F16,
            backend=Meddler(folder / "model.safetensors"),
            cache=cache if cached else None,
        )
    if cached:
        assert not prepared(cache)


# Several workers


def test_of_workers_that_start_at_once_one_prepares_and_all_compute_alike(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path / "model")
    expected = logits(folder)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as workers:
        for found in workers.map(lambda _: logits(folder, cache), range(4)):
            assert torch.equal(found, expected)
    assert len([each for each in caplog.records if each.getMessage() == PREPARED]) == 1
    assert len(prepared(cache)) == 1


def claimed(cache: WeightsCache, name: str = "m.safetensors", size: int = 1 << 20) -> Draft | PreparedFile | None:
    assert cache.is_usable()
    return cache.claim(name, size=size, header_bytes=4_000)


def publish(cache: WeightsCache, name: str, values: Tensor) -> None:
    draft = claimed(cache, name, size=values.nbytes)
    assert isinstance(draft, Draft)
    with closing(draft):
        draft.add("values", values)
        draft.publish()


def test_who_waits_in_vain_loads_alone(tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny(tmp_path / "model")
    expected = load(folder, cache)
    (name,) = prepared(cache)
    (cache.folder / name).unlink()
    hasty = WeightsCache(folder=cache.folder, wait_seconds=0)
    draft = claimed(cache, name)
    assert isinstance(draft, Draft)
    with closing(draft):
        assert torch.equal(logits(folder, hasty), all_logits(expected, TOKENS))
    assert why(caplog, WITHOUT) == ["another process takes too long to prepare them"]
    assert not prepared(cache)


def test_a_draft_of_a_killed_worker_is_taken_over(tmp_path: Path, cache: WeightsCache) -> None:
    code = """if True:
        import os, signal, sys, torch
        from pathlib import Path
        from twostroke.engine.loading.shelf import WeightsCache
        cache = WeightsCache(folder=Path(sys.argv[1]))
        assert cache.is_usable()
        draft = cache.claim("m.safetensors", size=1 << 20, header_bytes=4_000)
        draft.add("values", torch.ones(1_000))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", code, str(cache.folder)], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert prepared(cache) == {"m.safetensors.draft"}
    publish(cache, "m.safetensors", torch.full((10,), 2.0))
    file = claimed(cache)
    assert isinstance(file, PreparedFile)
    assert torch.equal(file.take("values", 10), torch.full((10,), 2.0))


# A bounded folder


def test_prepared_files_unused_for_longest_make_room_but_none_in_use(cache: WeightsCache) -> None:
    bounded = WeightsCache(folder=cache.folder, max_bytes=100_000)
    for age, name in enumerate(("used.safetensors", "oldest.safetensors", "newest.safetensors")):
        publish(bounded, name, torch.zeros(6_000))
        os.utime(cache.folder / name, ns=(age, age))
    opened = claimed(bounded, "used.safetensors")
    assert isinstance(opened, PreparedFile)
    values = opened.take("values", 6_000)
    os.utime(cache.folder / "used.safetensors", ns=(0, 0))
    del opened  # what was taken from it is still mapped
    publish(bounded, "another.safetensors", torch.zeros(6_000))
    assert prepared(cache) == {"used.safetensors", "newest.safetensors", "another.safetensors"}
    assert not values.any()
    del values
    publish(bounded, "last.safetensors", torch.zeros(6_000))
    assert prepared(cache) == {"newest.safetensors", "another.safetensors", "last.safetensors"}


def test_an_opened_file_counts_as_used_now(cache: WeightsCache) -> None:
    publish(cache, "m.safetensors", torch.zeros(10))
    os.utime(cache.folder / "m.safetensors", ns=(0, 0))
    claimed(cache)
    assert (cache.folder / "m.safetensors").stat().st_mtime_ns > 0


def test_weights_beyond_the_limit_are_not_kept(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path / "model")
    small = WeightsCache(folder=cache.folder, max_bytes=1_000)
    assert torch.equal(logits(folder, small), logits(folder))
    assert "would exceed the limit of 1000" in "".join(why(caplog, WITHOUT))
    assert not prepared(cache)


# A folder that cannot be used


@contextmanager
def full_disk(spare: int) -> Iterator[None]:
    """Let no file of this process grow beyond `spare` bytes: writing fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_one_log_line(tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny(tmp_path / "model")
    expected = logits(folder)
    with full_disk(100_000):
        found = logits(folder, cache)
    assert torch.equal(found, expected)
    assert [each.getMessage() for each in caplog.records] == ["weights could not be prepared for later starts"]
    assert not prepared(cache)


def test_a_folder_that_cannot_be_made_costs_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny(tmp_path / "model")
    (tmp_path / "file").write_bytes(b"")
    found = logits(folder, WeightsCache(folder=tmp_path / "file" / "weights"))
    assert torch.equal(found, logits(folder))
    assert [each.getMessage() for each in caplog.records] == [WITHOUT]


def test_a_folder_that_others_can_write_to_is_not_trusted(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path / "model")
    load(folder, cache)
    cache.folder.chmod(0o777)
    caplog.clear()
    assert not cache.is_usable()
    assert "can be written to by others" in why(caplog, WITHOUT)[0]
    assert torch.equal(logits(folder, cache), logits(folder))


def test_the_cache_folder_is_the_one_named_else_the_users() -> None:
    home = Path.home() / ".cache" / "twostroke"
    assert cache_folder({"TWOSTROKE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/twostroke")
    assert cache_folder({"XDG_CACHE_HOME": ""}) == cache_folder({}) == home
