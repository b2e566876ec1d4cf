"""One request among the workers. What was said to the caller is never said again, whichever worker is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from services.router.accounting import Account
from services.router.advisor import Retention
from services.router.answer import Answer, Choice
from services.router.handoffs import Handoffs
from services.router.member import Member
from services.router.metrics import Metrics
from services.router.placer import Placer
from services.router.prompt import Prompt
from services.router.stores import Stores
from services.router.tenure import Tenure
from twostroke.cluster import Role
from twostroke.errors import BlocksMissing, DeadlineExceeded, Overloaded, TwostrokeError, Unavailable
from twostroke.handoff import Admitted, DecodeOrder, First, Handover, PrefillOrder, Progress, Ticket
from twostroke.kv.refs import Lease
from twostroke.routing.stages import Event
from twostroke.telemetry import Span
from twostroke.types import CachedTokens, FinishReason, GenerateRequest, RequestContext, Token

TRIES = 2  # of each stage: one retry when a worker is lost
LOOKUP_SECONDS = 0.25
NO_DEADLINE_SECONDS = 86_400.0

# Another worker may do better; anything else is the request's own fault, or a defect.
_ANOTHER_WORKER = (Unavailable, Overloaded)


class Errand:
    """Prefill once, decode every choice, hold the lease in between."""

    def __init__(
        self,
        placer: Placer,
        stores: Stores,
        metrics: Metrics,
        request: GenerateRequest,
        prompt: Prompt,
        answer: Answer,
        account: Account,
        retention: Retention,
        deadline: float | None,
    ) -> None:
        self._placer = placer
        self._stores = stores
        self._metrics = metrics
        self._request = request
        self._prompt = prompt
        self._answer = answer
        self._account = account
        self._retention = retention
        self._deadline = deadline if deadline is not None else asyncio.get_running_loop().time() + NO_DEADLINE_SECONDS
        self._avoid: set[str] = set()  # incarnations that failed this request
        self._handoffs = Handoffs(answer.choices, metrics)
        self._renewing = asyncio.Lock()
        self._renewed: tuple[Ticket | None, Ticket | None] | None = None  # a ticket, and the one in its place

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._request.context.request_id

    async def run(self, span: Span) -> None:
        """Fill the answer. Raises TwostrokeError."""
        with self._handoffs:
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._run(span)
            except TimeoutError:
                raise DeadlineExceeded("the request's time is up") from None
            except BaseExceptionGroup as group:
                raise _first_cause(group) from None

    async def _run(self, span: Span) -> None:
        stored = await self._stored_blocks(span)
        decode = await self._placer.place(Role.DECODE, self._prompt, stored, self._avoid, span)
        async with Tenure(self._stores, self._handoffs.lease_ended) as tenure:
            ticket = await self._prefill_somewhere(self._answer.choices, decode, stored, tenure, span)
            choices = self._answer.open
            if not choices:
                return
            with span.child("twostroke.handoff", blocks=len(ticket.blocks) if ticket else 0) as handing_over:
                tenure.expect(choice.index for choice in choices)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._retention.prompt_stored())
                    for choice in choices:
                        tasks.create_task(self._finish(choice, decode, ticket, tenure, stored, handing_over))

    async def _stored_blocks(self, span: Span) -> int:
        """Leading blocks that the store holds; none when it does not answer at once."""
        with span.child("twostroke.lookup", blocks=len(self._prompt.keys)) as looking:
            try:
                soon = asyncio.get_running_loop().time() + LOOKUP_SECONDS
                held = await self._stores.lookup(self._prompt.keys, min(soon, self._deadline))
            except TwostrokeError as error:
                looking.set(reason=error.reason)
                return 0
            looking.set(held_blocks=held)
            return held

    def _context(self) -> RequestContext:
        """Every call to a worker is an attempt of its own."""
        self._account.attempts += 1
        return replace(self._request.context, attempt=self._account.attempts)

    async def _prefill_somewhere(
        self,
        choices: Sequence[Choice],
        decode: Member,
        stored: int,
        tenure: Tenure,
        span: Span,
        *,
        again: bool = False,
    ) -> Ticket | None:
        """Run the prompt on a prefill worker. Without a ticket, decode computes what is not stored.

        Args:
            choices: that wait for it.
            decode: told to load blocks while they are published.
            stored: leading blocks that the store holds.
            tenure: holds the lease.
            span: parent.
            again: the first tokens are known; only the blocks are wanted.
        """
        for attempt in range(1, TRIES + 1):
            if not self._placer.has(Role.PREFILL, self._avoid) and self._placer.has(Role.DECODE, self._avoid):
                self._handoffs.note(Event.PREFILL_ABSENT, *choices)
                return None  # decode runs the same engine
            member = await self._placer.place(Role.PREFILL, self._prompt, stored, self._avoid, span)
            called = member.incarnation
            try:
                return await self._prefill(choices, member, decode, tenure, span, again=again)
            except _ANOTHER_WORKER as error:
                self._note_failure(called, error)
                if again or self._begun():
                    self._handoffs.note(Event.PREFILL_LOST_LATE, *_open(choices))
                    return None  # the first tokens are out: decode goes on from them
                self._handoffs.note(Event.PREFILL_LOST, *choices)
                if isinstance(error, Overloaded) and not self._placer.has(Role.PREFILL, self._avoid):
                    raise
                if attempt == TRIES:
                    raise
        return None

    def _begun(self) -> bool:
        """Whether first tokens have come; one that completes a stop string ends its choice and counts as none."""
        return self._answer.completion_tokens > 0 or len(self._answer.open) < len(self._answer.choices)

    def _note_failure(self, incarnation: str | None, error: TwostrokeError) -> None:
        """Avoid the incarnation that was called; another may live at its address by now."""
        if incarnation is not None:
            self._avoid.add(incarnation)
        self._metrics.retried(error.reason)

    async def _prefill(
        self,
        choices: Sequence[Choice],
        member: Member,
        decode: Member,
        tenure: Tenure,
        span: Span,
        *,
        again: bool,
    ) -> Ticket | None:
        lease = replace(Lease.named(0), address=member.load.store)  # for how long is the worker's to say
        order = PrefillOrder(
            context=self._context(),
            prompt=self._prompt.ids,
            sampling=self._request.sampling,
            stops=self._prompt.stops,
            choices=self._request.n,
            lease_id=lease.id,
        )
        handed: Ticket | None = None
        self._handoffs.note(Event.PREFILL_CALLED, *choices)
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(member.prefill(order, self._deadline, span)) as events:
                ahead: asyncio.Task[None] | None = None
                async for event in events:
                    match event:
                        case Progress(published=published, lease=leased) if leased is not None:
                            keys = self._prompt.keys[:published]
                            if keys and (ahead is None or ahead.done()):
                                ahead = tasks.create_task(decode.prefetch(order, keys, leased, span))
                        case First() if not again:
                            self._take_first(event)
                        case Handover(ticket=handed):
                            tenure.hold(handed)
                            self._handoffs.note(Event.HANDED_OVER, *_open(choices))
                            if ahead is not None:
                                ahead.cancel()  # decode loads the rest itself, under the ticket
                # Read to the end: only then does the worker know that the lease has a new holder.
        except BaseException as error:
            self._stores.release(lease)  # a ticket may be on its way to us: whoever leaves does not read it
            if isinstance(error, BaseExceptionGroup):  # of the task group; callers look at the kind
                raise _first_cause(error) from None
            raise
        return handed

    def _take_first(self, first: First) -> None:
        self._account.cached = first.cached
        for choice, (token, finish) in zip(self._answer.choices, first.tokens, strict=True):
            self._push(choice, (token,), finish, Event.FIRST_TOKEN)

    def _push(self, choice: Choice, tokens: Sequence[Token], finish: FinishReason | None, event: Event) -> None:
        self._answer.push(choice, tokens, finish)
        self._handoffs.note(event if choice.finish is None else Event.FINISHED, choice)

    async def _finish(
        self, choice: Choice, decode: Member, ticket: Ticket | None, tenure: Tenure, stored: int, span: Span
    ) -> None:
        """Decode one choice to its end.

        A lost worker is replaced, once for each stretch without a token; lost blocks are computed again once.
        """
        lost = missing = 0
        member = decode
        while True:
            called, before = member.incarnation, len(choice.emitted)
            try:
                await self._decode(choice, member, ticket, tenure, span)
            except BlocksMissing as error:
                missing += 1
                self._metrics.retried(error.reason)
                self._handoffs.note(Event.BLOCKS_MISSING if missing == 1 else Event.BLOCKS_MISSING_AGAIN, choice)
                # The second time decode computes all of it.
                ticket = await self._prefill_again(choice, ticket, member, tenure, span) if missing == 1 else None
            except _ANOTHER_WORKER as error:
                lost = 1 if len(choice.emitted) > before else lost + 1
                self._note_failure(called, error)
                alone = isinstance(error, Overloaded) and not self._placer.has(Role.DECODE, self._avoid)
                if lost == TRIES or alone:
                    raise
                self._handoffs.note(Event.DECODE_LOST, choice)
                ticket = None  # the store knows more by now than the ticket says
                member = await self._placer.place(Role.DECODE, self._prompt, stored, self._avoid, span)
            else:
                return

    async def _prefill_again(
        self, choice: Choice, stale: Ticket | None, decode: Member, tenure: Tenure, span: Span
    ) -> Ticket | None:
        """A new ticket, once for all choices that miss the blocks of the same old one."""
        async with self._renewing:
            if self._renewed is None or self._renewed[0] is not stale:
                self._renewed = stale, await self._prefill_somewhere([choice], decode, 0, tenure, span, again=True)
            else:
                self._handoffs.note(Event.TICKET_SHARED, choice)
            return self._renewed[1]

    async def _decode(self, choice: Choice, member: Member, ticket: Ticket | None, tenure: Tenure, span: Span) -> None:
        order = DecodeOrder(
            context=self._context(),
            prompt=self._prompt.ids,
            emitted=tuple(choice.emitted),
            sampling=self._request.sampling,
            stops=self._prompt.stops,
            choice=choice.index,
            ticket=ticket,
        )
        self._handoffs.note(Event.DECODE_CALLED, choice)
        async with aclosing(member.decode(order, self._deadline, span)) as news:
            async for written in news:
                if written.admitted is not None:
                    tenure.admitted(choice.index)
                    self._note_cached(written.admitted, order)
                    self._handoffs.note(Event.ADMITTED, choice)
                self._push(choice, written.tokens, written.finish, Event.TOKENS)
                if choice.finish is not None:
                    return
        if choice.finish is None:
            raise Unavailable(f"{member.address} ended a stream without a reason")

    def _note_cached(self, admitted: Admitted, order: DecodeOrder) -> None:
        """Where no prefill worker took part, decode's own cache is what the caller profited from."""
        if not order.emitted:
            self._account.cached = CachedTokens(local=admitted.local, store=admitted.store)


def _open(choices: Sequence[Choice]) -> list[Choice]:
    return [choice for choice in choices if choice.finish is None]


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that the caller is told, of several that came at once."""
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
