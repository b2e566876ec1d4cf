"""A part of the fault kit: the others run with `make faults`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.kit.__main__ import scene
from tests.faults.kit.points import Blow, Case, cases
from tests.faults.kit.scene import Scene

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Kills at every message, and each other blow where an answer of the store leaves a writer in doubt.
CASES = [
    case
    for case in cases()
    if case.blow is Blow.KILL_SERVER
    or (case.point.name == "computing/Reserve.answered" and case.blow is not Blow.STOP_SERVER)
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with scene(tmp_path_factory.mktemp("stage"), seed=1) as playing:
        yield playing


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_whatever_is_struck_the_answer_is_exact_and_everything_comes_back(stage: Scene, case: Case) -> None:
    await stage.play(case)


async def test_callers_that_leave_at_any_moment_leave_nothing_held(stage: Scene) -> None:
    for _ in range(20):
        await stage.leave()
