"""Fixtures that every test has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from hypothesis import settings

# How long an example takes says nothing here: the machine may be busy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none: the summary says how many."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Two torch threads beside a busy neighbour are slower than one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fail a test that leaves a task behind."""
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    if left:
        await asyncio.wait(left, timeout=1)  # tasks that are ending may end
    assert not [task for task in left if not task.done()]
