"""A part of the fault kit: the others run with `make faults`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.kit.disk import DiskCase, Phase, disk_cases
from tests.faults.kit.points import Case, cases
from tests.faults.kit.redis import Ask, Outage, RedisCase
from tests.faults.kit.strikes import Blow
from tests.faults.kit.theatre import Theatre, two_hosts

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Kills at every message, and each other blow where an answer of the store leaves a writer in doubt; one of each phase
# of the disk.
CASES: list[Case | DiskCase] = [
    case
    for case in cases()
    if case.blow is Blow.KILL_SERVER
    or (case.point.name == "computing/Reserve.answered" and case.blow is not Blow.STOP_SERVER)
]
CASES += [
    next(case for case in disk_cases() if (case.phase, case.blow) == chosen)
    for chosen in ((Phase.WRITTEN, Blow.FULL), (Phase.OPENED, Blow.FAIL), (Phase.READ, Blow.CORRUPT))
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def theatre(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Theatre]:
    async with Theatre.opened(tmp_path_factory.mktemp("theatre"), seed=1) as opened:
        yield opened


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_whatever_is_struck_the_answer_is_exact_and_everything_comes_back(
    theatre: Theatre, case: Case | DiskCase
) -> None:
    await theatre.play(case)


@pytest.mark.parametrize(
    "case",
    [RedisCase(Ask.LOOKUP, Outage.KILLED), RedisCase(Ask.WRITE, Outage.SWALLOWED)],
    ids=lambda case: case.name,
)
async def test_without_redis_each_side_serves_alone_until_it_is_back(case: RedisCase, tmp_path: Path) -> None:
    async with two_hosts(tmp_path, seed=1) as scene:
        await scene.play(case)


async def test_callers_that_leave_at_any_moment_leave_nothing_held(theatre: Theatre) -> None:
    for _ in range(20):
        await theatre.handoff.leave()
