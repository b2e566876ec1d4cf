"""A request's one path: tokenize, place, prefill, hand over, decode; with what is tried again when a worker is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace

from services.router.accounting import Account, Ledger
from services.router.advisor import Advisor, Retention
from services.router.answer import Answer
from services.router.errand import Errand
from services.router.fleet import Fleet, ServedModel
from services.router.gateway.generator import ModelCard
from services.router.metrics import Metrics
from services.router.placer import Placer
from services.router.prompt import Prompt, prepare
from services.router.stores import Stores
from twostroke.cluster import Role
from twostroke.errors import DeadlineExceeded, Unavailable
from twostroke.telemetry import Span, Telemetry, log_as
from twostroke.types import Advice, Advised, ChoiceFinished, Delta, Event, GenerateRequest, Started, Usage

TOKENIZER_THREADS = 2
ID_CHARACTERS = 100  # of the caller's id inside the cluster's


class Dispatch:
    """What both doors call."""

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        stores: Stores,
        advisor: Advisor,
        ledger: Ledger,
        metrics: Metrics,
        telemetry: Telemetry,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._stores = stores
        self._advisor = advisor
        self._ledger = ledger
        self._metrics = metrics
        self._telemetry = telemetry
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    @property
    def models(self) -> Sequence[ModelCard]:
        """The model served; none until workers of both kinds are warm."""
        model = self._fleet.model
        if model is None:
            return ()
        return (
            ModelCard(
                id=model.info.id,
                fingerprint=model.info.fingerprint,
                weight_mode=model.info.weight_mode,
                context_tokens=model.info.context_tokens,
                created=model.created,
            ),
        )

    @property
    def readiness(self) -> str | None:
        """None when ready, else one line that says why not."""
        return self._fleet.readiness

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of a token; none for a control token."""
        return self._require_model().tokenizer.token_bytes(token_id)

    def control_name(self, token_id: int) -> str | None:
        """What templates call a control token; None for every other token."""
        return self._require_model().tokenizer.control_name(token_id)

    def render_metrics(self) -> bytes:
        """All metrics in the Prometheus text format."""
        for role in Role:
            self._metrics.workers.labels(role.value).set(len(self._fleet.available(role)))
        return self._metrics.render()

    async def generate(self, request: GenerateRequest, deadline: float | None) -> AsyncGenerator[Event, None]:
        """Yield Started, then deltas, one ChoiceFinished per choice, and Usage last; closing it stops all work.

        Args:
            request: checked by `twostroke.limits`.
            deadline: event loop time at which the request ends with DeadlineExceeded.

        Raises: TwostrokeError. What makes a request refusable is found before Started.
        """
        attributes = {
            "request_id": request.context.request_id,
            "choices": request.n,
            "seed": str(request.sampling.seed),
        }
        with (
            self._ledger.account(request) as account,
            self._metrics.open_requests.track_inprogress(),
            self._placer.admitted(request.n),
            self._telemetry.span("twostroke.request", parent=request.traceparent, **attributes) as span,
        ):
            log_as(request.context.request_id, span)
            model = self._require_model()
            inner = _told_apart(request)
            prompt = await self._prepared(model, inner, span)
            account.model, account.prompt_tokens = model.info.id, len(prompt.ids)
            yield Started(
                request_id=request.context.request_id,
                model=model.info.id,
                seed=request.sampling.seed,
                prompt_tokens=len(prompt.ids),
                fingerprint=model.info.fingerprint,
                truncated_tokens=prompt.truncated_tokens,
            )
            answer = Answer(request.n, model.tokenizer, request.stop_strings, min_tokens=prompt.stops.min_tokens)
            retention = Retention(self._advisor, inner, prompt)
            errand = Errand(
                self._placer, self._stores, self._metrics, inner, prompt, answer, account, retention, deadline
            )
            async with aclosing(self._answered(errand, answer, account, span)) as events:
                async for event in events:
                    yield event
            yield Usage(
                prompt_tokens=account.prompt_tokens,
                completion_tokens=account.completion_tokens,
                cached=account.cached,
                kept_blocks=await retention.answered([choice.emitted for choice in answer.choices]),
            )
            span.set(output_tokens=account.completion_tokens, cached_tokens=account.cached.total)

    async def advise(self, advice: Advice, request: GenerateRequest, deadline: float) -> Advised:
        """Advise the store about the blocks of a request's prompt, of the caller's own namespace.

        A store that is away, or holds nothing of it, is an advice that was good for no block.

        Args:
            advice: what to do.
            request: checked by `twostroke.limits`; what does not concern its prompt means nothing.
            deadline: event loop time.
        Raises: TwostrokeError.
        """
        context = request.context
        attributes = {"request_id": context.request_id, "advice": advice.value}
        with (
            self._advisor.admitted(context.namespace),
            self._telemetry.span("twostroke.advice", parent=request.traceparent, **attributes) as span,
        ):
            log_as(context.request_id, span)
            model = self._require_model()
            try:
                async with asyncio.timeout_at(deadline):
                    prompt = await self._prepared(model, request, span)
                    done = await self._advisor.advise(
                        advice, context.namespace, prompt.keys, request.keep_for or 0.0, deadline
                    )
            except TimeoutError:
                raise DeadlineExceeded("the call's time is up") from None
            blocks = done.blocks if done else 0
            span.set(blocks=len(prompt.keys), advised_blocks=blocks)
            return Advised(
                model=model.info.id,
                prompt_tokens=len(prompt.ids),
                prompt_blocks=len(prompt.keys),
                blocks=blocks,
                keep_for=done.seconds if done and advice is Advice.KEEP else None,
            )

    async def _prepared(self, model: ServedModel, request: GenerateRequest, span: Span) -> Prompt:
        with span.child("twostroke.tokenize") as tokenizing:
            loop = asyncio.get_running_loop()
            prompt = await loop.run_in_executor(self._threads, prepare, model, request)
            tokenizing.set(prompt_tokens=len(prompt.ids))
        return prompt

    async def _answered(
        self, errand: Errand, answer: Answer, account: Account, span: Span
    ) -> AsyncGenerator[Delta | ChoiceFinished, None]:
        """Run the errand in a task of its own: task groups and timeouts must not span a yield."""
        task = asyncio.create_task(errand.run(span), name=f"errand {errand.request_id}")
        task.add_done_callback(lambda _: answer.close())
        try:
            async for event in answer.events():
                if isinstance(event, ChoiceFinished):
                    account.finish.append(event.reason.value)
                else:
                    account.note_token()
                account.completion_tokens = answer.completion_tokens
                yield event
            await task
        finally:
            account.completion_tokens = answer.completion_tokens
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # retrieved: it was raised above, or the caller has left

    def _require_model(self) -> ServedModel:
        model = self._fleet.model
        if model is None:
            raise Unavailable(self._fleet.readiness or "the cluster is not ready yet", retry_after=1)
        return model

    def close(self) -> None:
        """Stop the tokenizer threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _told_apart(request: GenerateRequest) -> GenerateRequest:
    """The request under an id that no other has: callers choose theirs, and workers end what an equal one replaces."""
    unique = f"{request.context.request_id[:ID_CHARACTERS]}~{secrets.token_hex(6)}"
    return replace(request, context=replace(request.context, request_id=unique))
