"""deploy/compose.yaml and `twostroke up` are one cluster, told in two ways."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from twostroke.launcher.options import UpOptions
from twostroke.launcher.plan import Place, Role, Site, plan
from twostroke.settings import parse_bytes

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OPTIONS = UpOptions(prefill=2, decode=2)


def container(name: str) -> Place:
    return Place(listen="0.0.0.0:7000", reach=f"{name}:7000")


CONTAINERS = Site(
    model=Path("/models/SmolLM2-135M-Instruct.Q4_1.gguf"),
    name="",
    arena_directory=Path("/arena"),
    kvstore=container("kvstore"),
    prefill=(container("prefill-1"), container("prefill-2")),
    decode=(container("decode-1"), container("decode-2")),
    router=Place(listen="0.0.0.0:8001", reach="router:8001"),
    http_listen="0.0.0.0:8000",
)
SPECS = {spec.name: spec for spec in plan(OPTIONS, CONTAINERS)}


def test_compose_and_up_start_the_same_commands() -> None:
    told = {name: tuple(shlex.split(service["command"])) for name, service in SERVICES.items() if name != "redis"}
    assert told == {name: ("python", *spec.command) for name, spec in SPECS.items()}


def test_every_container_waits_for_the_health_of_those_it_needs() -> None:
    for name, spec in SPECS.items():
        needs = set(SERVICES[name]["depends_on"])
        match spec.role:
            case Role.KVSTORE:
                assert needs == {"redis"}
            case Role.PREFILL | Role.DECODE:
                assert needs == {"kvstore"}
            case Role.ROUTER:
                assert needs == set(SPECS) - {"router"}
        assert all(need == {"condition": "service_healthy"} for need in SERVICES[name]["depends_on"].values())


def test_every_container_is_probed_where_it_listens() -> None:
    for name, spec in SPECS.items():
        port = spec.arguments[spec.arguments.index("--listen") + 1].rpartition(":")[2]
        assert SERVICES[name]["healthcheck"]["test"] == ["CMD", "twostroke", "probe", f"127.0.0.1:{port}"]


def test_only_those_that_map_the_arena_share_its_volume_and_it_is_large_enough() -> None:
    mapping = {name for name, service in SERVICES.items() if "arena:/arena" in service.get("volumes", ())}
    assert mapping == set(SPECS) - {"router"}
    volume = COMPOSE["volumes"]["arena"]["driver_opts"]
    size = dict(pair.split("=") for pair in volume["o"].split(","))["size"]
    assert volume["type"] == "tmpfs"
    assert parse_bytes("size", size.removesuffix("m") + "MiB") > OPTIONS.arena_size


def test_the_workers_share_one_cache_of_prepared_weights() -> None:
    sharing = {name for name, service in SERVICES.items() if "cache:/cache" in service.get("volumes", ())}
    assert sharing == {name for name, spec in SPECS.items() if spec.role.is_worker}
    assert "cache" in COMPOSE["volumes"]
    assert "ENV TWOSTROKE_CACHE=/cache" in (ROOT / "deploy" / "Dockerfile").read_text()


def test_a_container_has_longer_to_stop_than_its_service_takes_to_drain() -> None:
    for name in SPECS:
        assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) > OPTIONS.drain_seconds
