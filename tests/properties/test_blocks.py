from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from twostroke.engine.blocks import BlockPool

PAGES = 9
KEYS = [bytes([number]) for number in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model of it: who holds what, and what each page was last known by."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(PAGES)
        self.held: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, PAGES))
    def take(self, count: int) -> None:
        available = self.pool.available
        taken = self.pool.take(count)
        assert (taken is None) == (count > available)
        for page in taken or ():
            assert self.held[page] == 0
            self.held[page] = 1
            self.content.pop(page, None)

    @precondition(lambda self: +self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(+self.held)))
        if self.content.get(page, key) != key:
            return
        known = self.pool.find(key)
        won = self.pool.publish(page, key, 4)
        assert won == (known is None or known.page == page)
        if won:
            self.content[page] = key

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(+self.held)))
        self.held[page] -= 1
        self.pool.release([page])

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def share(self, keys: list[bytes]) -> None:
        pages = self.pool.match(keys)
        assert [self.content[page] for page in pages] == keys[: len(pages)]
        self.pool.hold(pages)
        self.held.update(pages)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.content.clear()

    @invariant()
    def every_page_is_in_exactly_one_state(self) -> None:
        self.pool.check_integrity()
        assert self.pool.available + len(+self.held) == self.pool.capacity

    @invariant()
    def the_index_names_only_what_is_there(self) -> None:
        for key in KEYS:
            known = self.pool.find(key)
            assert known is None or self.content[known.page] == key


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
