from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.paper import PAGE_TOKENS, Desk, paper_request, written
from twostroke.engine.sequence import EngineRequest
from twostroke.errors import BlocksMissing, ContextTooLong, Overloaded
from twostroke.types import Priority

# Two letters make prompts share prefixes often.
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14)


class EngineMachine(RuleBasedStateMachine):
    """Requests, cancellations, loans and steps in any order; each answer must be the one written on paper."""

    @initialize(
        pages=st.integers(5, 14),
        tokens=st.integers(4, 12),
        running=st.integers(1, 4),
        chunk=st.none() | st.integers(1, 8),
    )
    def start(self, pages: int, tokens: int, running: int, chunk: int | None) -> None:
        limits = {} if chunk is None else {"max_chunk": chunk}
        self.desk = Desk(pages=pages, tokens_per_step=tokens, max_running=running, max_waiting=6, **limits)
        self.requests: dict[int, EngineRequest] = {}
        self.cancelled: set[int] = set()
        self.returned: dict[int, int] = {}  # exported pages given back so far, by sequence
        self.taken: list[int] = []

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        emitted=st.integers(0, 3),
        priority=st.sampled_from(Priority),
        first=st.booleans(),
        export=st.booleans(),
        uncached=st.none() | st.integers(0, 12),
        private=st.booleans(),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        emitted: int,
        priority: Priority,
        first: bool,
        export: bool,
        uncached: int | None,
        private: bool,
    ) -> None:
        request = paper_request(
            prompt,
            max_tokens=max_tokens,
            emitted=tuple(written(prompt, min(emitted, max_tokens))[0]) if emitted else (),
            choices=(0, 1, 2) if first else (0,),
            priority=priority,
            first_token_only=first,
            export=export,
            max_uncached=uncached,
            ignore_eos=False,
        )
        if private:
            request = replace(request, root=b"private %d" % len(self.requests))
        try:
            self.requests[self.desk.submit(request)] = request
        except ContextTooLong:
            assert len(prompt) + max_tokens - 1 > self.desk.bounds.pages * PAGE_TOKENS

    @rule()
    def step(self) -> None:
        ran, load = self.desk.step(), self.desk.core.load()
        assert ran or not load.running  # who waits for one that runs does not wait in vain

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        self.cancelled.add(number)
        self.desk.core.cancel(number)

    @rule(count=st.integers(1, 3))
    def borrow(self, count: int) -> None:
        pages = self.desk.core.loans.take(count)
        for page in pages:
            self.desk.paper.pages[page] = [99] * PAGE_TOKENS  # whoever still reads it answers wrongly
        self.taken += pages

    @rule()
    def give_back(self) -> None:
        self.desk.core.loans.give_back(self.taken)
        self.taken = []
        for number in self.requests:
            lent = self.desk.lent(number)
            self.desk.core.loans.give_back(lent[self.returned.get(number, 0) :])
            self.returned[number] = len(lent)

    @invariant()
    def pages_add_up(self) -> None:
        self.desk.core.check_integrity()

    @invariant()
    def limits_hold(self) -> None:
        assert self.desk.core.load().running <= self.desk.settings.max_running
        if self.desk.paper.steps:
            last = self.desk.paper.steps[-1]
            assert sum(chunk.count for chunk in last.chunks) <= self.desk.settings.tokens_per_step
            assert len({chunk.sequence.number for chunk in last.chunks}) == len(last.chunks)

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        self.give_back()
        while self.desk.step():
            self.give_back()
        load = self.desk.core.load()
        assert not load.busy
        assert load.free_pages + load.evictable_pages == load.pages
        for number, request in self.requests.items():
            self.judge(number, request)

    def judge(self, number: int, request: EngineRequest) -> None:
        """The tokens are those on paper, as far as the sequence got; without a cause it got to the end."""
        given = self.desk.tokens(number)
        tokens, finish = written(request.prompt, request.stops.max_tokens)
        expected = tokens[len(request.emitted) :]
        if request.first_token_only:
            ended = len(request.emitted) == len(tokens)
            assert given == [] if not given or ended else given[0] == expected[0]
            complete = ended or len(given) == 3
        else:
            assert given == expected[: len(given)]
            complete = given == expected and (not given or self.desk.finish(number) is finish)
        error = self.desk.errors.get(number)
        assert complete or number in self.cancelled or isinstance(error, BlocksMissing | Overloaded)


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEngine = EngineMachine.TestCase
