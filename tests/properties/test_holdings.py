"""Holdings: whatever comes, goes, is written, lost or too much, a reader of the writes ends with what is held."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kvstore.directory.holdings import Holdings

BACKLOG = 5
KEYS = st.lists(st.integers(0, 11).map(lambda name: name.to_bytes(16, "little")), max_size=7)


class HoldingsMachine(RuleBasedStateMachine):
    """`told` is what a reader who took every write would know."""

    def __init__(self) -> None:
        super().__init__()
        self.holdings = Holdings(BACKLOG)
        self.held: set[bytes] = set()
        self.told: set[bytes] = set()

    @rule(keys=KEYS)
    def add(self, keys: list[bytes]) -> None:
        self.holdings.add(keys)
        self.held.update(keys)

    @rule(keys=KEYS)
    def remove(self, keys: list[bytes]) -> None:
        self.holdings.remove(keys)
        self.held.difference_update(keys)

    @rule(limit=st.integers(0, 6))
    def write(self, limit: int) -> None:
        changes = self.holdings.take(limit)
        assert len(changes.added) + len(changes.removed) <= limit
        assert not set(changes.added) & self.told  # a change is always news
        assert set(changes.removed) <= self.told or self.holdings.uncertain
        self.told = (self.told | set(changes.added)) - set(changes.removed)

    @rule()
    def write_whole(self) -> None:
        self.told = set(self.holdings.whole())

    @rule(told=KEYS)
    def lose(self, told: list[bytes]) -> None:
        self.holdings.doubt()
        self.told = set(told)

    @invariant()
    def everything_told_and_waiting_is_what_is_held(self) -> None:
        assert len(self.holdings) == len(self.held)
        assert self.holdings.waiting <= BACKLOG
        if self.holdings.uncertain:
            assert not self.holdings.waiting
        else:
            assert len(self.told ^ self.held) == self.holdings.waiting

    def teardown(self) -> None:
        if self.holdings.uncertain:
            self.write_whole()
        self.write(BACKLOG)
        assert self.told == self.held


HoldingsMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestHoldings = HoldingsMachine.TestCase
