"""How many calls about stored prompts a namespace may have open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from services.router.advisor import Advisor
from services.router.metrics import Metrics
from services.router.settings import DispatchSettings
from services.router.stores import Stores
from twostroke.errors import Overloaded
from twostroke.settings import InvalidSetting


@contextmanager
def full(advisor: Advisor, namespace: str, calls: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(calls):
            stack.enter_context(advisor.admitted(namespace))
        yield


async def test_a_namespace_with_its_calls_open_is_refused_and_no_other_is() -> None:
    async with Stores.connected(lambda: None, tuple) as stores:
        advisor = Advisor(stores, Metrics(), 3)
        with full(advisor, "a", 3):
            with pytest.raises(Overloaded) as refused, advisor.admitted("a"):
                pass
            assert refused.value.retry_after == 1
            with full(advisor, "b", 3):
                pass
        with full(advisor, "a", 3):
            pass


def test_a_bound_of_no_calls_is_refused() -> None:
    with pytest.raises(InvalidSetting):
        DispatchSettings(advice_calls=0)
