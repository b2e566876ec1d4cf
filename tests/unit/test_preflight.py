"""What cannot work is refused before anything starts, with a cure."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke.engine.mode import KvMode
from twostroke.launcher.options import MAX_PORT, UpOptions
from twostroke.launcher.plan import Role, plan
from twostroke.launcher.preflight import state_directory, survey
from twostroke.launcher.refusal import Refusal
from twostroke.settings import InvalidSetting


@pytest.fixture
def options(tmp_path: Path) -> UpOptions:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_tiny(folder)
    write_tiny_tokenizer(folder)
    return UpOptions(model=str(folder), port=0, arena_bytes="1MiB", state_directory=tmp_path / "state")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def ports_of(options: UpOptions) -> list[int]:
    site = survey(options)
    listeners = [
        site.http_listen,
        *(place.listen for place in (site.router, site.kvstore, *site.prefill, *site.decode)),
    ]
    return [int(address.rpartition(":")[2]) for address in listeners]


def test_every_process_gets_a_port_of_its_own(options: UpOptions) -> None:
    ports = ports_of(replace(options, prefill=3, decode=4))
    assert len(set(ports)) == len(ports) == 2 + 1 + 3 + 4


def test_the_grpc_door_is_next_to_the_http_door(options: UpOptions) -> None:
    for _ in range(100):
        with taken_port() as start:
            pass
        try:
            assert ports_of(replace(options, port=start))[:2] == [start, start + 1]
        except Refusal:  # somebody else has one of the two just now
            continue
        return
    pytest.fail("no two neighbouring ports were free")


def test_only_the_doors_leave_loopback(options: UpOptions) -> None:
    site = survey(replace(options, host="0.0.0.0"))
    assert site.http_listen.startswith("0.0.0.0:")
    assert site.router.listen.startswith("0.0.0.0:")
    assert all(place.listen.startswith("127.0.0.1:") for place in (site.kvstore, *site.prefill, *site.decode))


def test_a_busy_port_is_named_with_its_flag(options: UpOptions) -> None:
    with taken_port() as port:
        with pytest.raises(Refusal, match=f"port {port} on 127.0.0.1 is in use") as refused:
            survey(replace(options, port=port))
        assert refused.value.cure == "choose another with --port"
        with pytest.raises(Refusal, match=f"port {port} ") as refused:
            survey(replace(options, grpc_port=port))
        assert refused.value.cure == "choose another with --grpc-port"


def test_a_host_that_is_not_ours_is_refused(options: UpOptions) -> None:
    with pytest.raises(Refusal):
        survey(replace(options, host="192.0.2.1"))  # TEST-NET-1, RFC 5737


@pytest.mark.parametrize("name", ["missing.gguf", "missing"])
def test_a_missing_model_is_named(options: UpOptions, tmp_path: Path, name: str) -> None:
    with pytest.raises(Refusal, match=f"there is no model at .*{name}"):
        survey(replace(options, model=str(tmp_path / name)))


def test_a_file_that_is_no_model_is_refused_before_any_worker_reads_it(options: UpOptions, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"not a model at all")
    with pytest.raises(Refusal, match="does not start with GGUF"):
        survey(replace(options, model=str(wrong)))


def test_a_folder_without_a_configuration_is_refused(options: UpOptions, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match=r"config\.json"):
        survey(replace(options, model=str(tmp_path / "empty")))


def test_an_arena_that_can_never_fit_is_refused_with_both_sizes(options: UpOptions) -> None:
    whole = shutil.disk_usage("/dev/shm").total >> 20
    with pytest.raises(Refusal, match=rf"needs .* MiB in /dev/shm, which has {whole:,} MiB"):
        survey(replace(options, arena_bytes="1000000GiB", arena_directory=Path("/dev/shm")))


def test_an_arena_folder_that_is_missing_is_refused(options: UpOptions, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="does not exist"):
        survey(replace(options, arena_directory=tmp_path / "nowhere"))


def test_logs_of_clusters_side_by_side_lie_apart(options: UpOptions) -> None:
    folders = {state_directory(options, replace(survey(options), http_listen=f"127.0.0.1:{port}")) for port in (1, 2)}
    assert len(folders) == 2


def test_a_log_folder_that_cannot_be_made_is_refused(options: UpOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="cannot make the log folder") as refused:
        state_directory(replace(options, state_directory=tmp_path / "file"), survey(options))
    assert "--state-directory" in refused.value.cure


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": 0},
        {"decode": 17},
        {"port": -1},
        {"port": MAX_PORT},
        {"port": 9, "grpc_port": 9},
        {"threads": 0},
        {"threads": (os.cpu_count() or 1) + 1},
        {"kv_bytes": "much"},
        {"arena_bytes": "-1"},
        {"drain_seconds": float("nan")},
        {"log_level": "loud"},
    ],
)
def test_an_option_out_of_its_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting, match=r"must|choose"):
        UpOptions(**wrong)  # type: ignore[arg-type]


def test_the_plan_starts_the_store_first_and_the_router_last(options: UpOptions) -> None:
    specs = plan(replace(options, prefill=2), survey(replace(options, prefill=2)))
    assert [spec.name for spec in specs] == ["kvstore", "prefill-1", "prefill-2", "decode-1", "router"]
    assert specs[0].role is Role.KVSTORE


@pytest.mark.parametrize(("kv", "told"), [(KvMode.AUTO, False), (KvMode.BF16, True)])
def test_workers_are_told_what_keys_and_values_are_kept_in(options: UpOptions, kv: KvMode, told: bool) -> None:
    chosen = replace(options, kv_dtype=kv)
    for spec in plan(chosen, survey(chosen))[1:3]:
        assert (("--kv-dtype", kv) in pairwise(spec.arguments)) is told


def test_the_router_is_told_where_every_worker_listens(options: UpOptions) -> None:
    specs = {spec.name: spec.arguments for spec in plan(options, survey(options))}
    router, kvstore = (dict(zip(specs[name][::2], specs[name][1::2], strict=True)) for name in ("router", "kvstore"))
    for role in ("prefill", "decode"):
        worker = dict(zip(specs[f"{role}-1"][::2], specs[f"{role}-1"][1::2], strict=True))
        assert router[f"--{role}"] == worker["--listen"]
        assert worker["--kvstore"] == kvstore["--listen"]
