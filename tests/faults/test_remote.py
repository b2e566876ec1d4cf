"""The kit against a cluster that it did not start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kit.disk import disk_cases
from tests.faults.kit.points import Case, cases
from tests.faults.kit.remote import NotAimedError, Remote, is_far
from tests.faults.kit.strikes import Blow
from tests.support.cluster import SERVER, Shape, started, tiny_model
from twostroke.rpc.server import ServerSettings

STRUCK = ServerSettings(drain_seconds=5.0, fault_points=True)


def test_nothing_is_killed_stopped_or_started_again_in_a_cluster_of_somebody_else() -> None:
    blows = {case.blow for case in (*disk_cases(), *cases()) if is_far(case)}
    assert blows == set(Blow) - {Blow.KILL_SERVER, Blow.KILL_CALLER, Blow.STOP_SERVER}


async def test_a_cluster_of_somebody_else_is_found_through_its_router_and_struck(tmp_path: Path) -> None:
    points = ("queued/Lookup.called", "computing/Commit.answered")  # where what is lost need not end by time
    wanted = [
        case
        for case in cases()
        if is_far(case) and case.point.name in points and case.blow in (Blow.DELAY, Blow.CANCEL, Blow.CORRUPT)
    ]
    async with (
        started(Shape(model=tiny_model(tmp_path), server=STRUCK)) as cluster,
        Remote.reached(cluster.doors.grpc, None, tie=0.0, seed=1) as remote,
    ):
        assert {kind: len(found) for kind, found in remote.servers.items()} == {"prefill": 1, "decode": 1, "kvstore": 1}
        for case in wanted:
            outcome = await remote.play(case)
            assert outcome is not None
            assert outcome.name == case.name
        await remote.leave()
    assert len(wanted) == 5


async def test_what_a_request_does_not_come_by_is_passed_by(tmp_path: Path) -> None:
    late = Case(replace(next(cases()).point, skip=500), Blow.DELAY)
    async with (
        started(Shape(model=tiny_model(tmp_path), server=STRUCK)) as cluster,
        Remote.reached(cluster.doors.grpc, None, tie=0.0, seed=1) as remote,
    ):
        assert await remote.play(late) is None
        assert await remote.play(next(disk_cases())) is None  # it has no disk


async def test_without_fault_points_the_kit_says_what_to_do(tmp_path: Path) -> None:
    case = next(case for case in cases() if is_far(case))
    async with (
        started(Shape(model=tiny_model(tmp_path), server=SERVER)) as cluster,
        Remote.reached(cluster.doors.grpc, None, tie=0.0, seed=1) as remote,
    ):
        with pytest.raises(NotAimedError, match="--fault-points"):
            await remote.play(case)
