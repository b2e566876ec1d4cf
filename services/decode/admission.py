"""Admission: a prompt's blocks into pages, then the sequence into the engine; what is short and missing is computed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from services.decode.publisher import Publisher
from twostroke.engine.outputs import StepOutput
from twostroke.engine.sequence import EngineRequest
from twostroke.errors import BlocksMissing
from twostroke.handoff import Admitted, DecodeOrder, Written
from twostroke.kv.keys import block_keys
from twostroke.kv.refs import Lease, Terms
from twostroke.telemetry import Span
from twostroke.types import RequestContext
from twostroke.worker.loading import Prefix, load_prefix
from twostroke.worker.worker import Worker

LOADS = 2  # blocks that were loaded may be evicted before the sequence is admitted; the lease still holds them


class Admission:
    """Runs orders on the worker's engine."""

    def __init__(self, worker: Worker, publisher: Publisher, *, recompute_tokens: int) -> None:
        self._worker = worker
        self._publisher = publisher
        self._recompute_tokens = recompute_tokens

    async def prefetch(
        self, context: RequestContext, keys: tuple[bytes, ...], lease: Lease | None, deadline: float | None
    ) -> Prefix:
        """Load leading full blocks; answers what is in pages now, without a lease of its own."""
        sizes = [self._worker.kv_format.block_tokens] * len(keys)
        terms = self._worker.terms(context)
        if lease is not None:
            return await load_prefix(self._worker, keys, sizes, lease, terms, deadline=deadline)
        return await self._load_alone(keys, sizes, terms, deadline)

    async def run(self, order: DecodeOrder, deadline: float | None, span: Span) -> AsyncGenerator[Written, None]:
        """Yield the tokens of one choice. Leaving, for any reason, frees everything of the sequence.

        Raises: BlocksMissing, when more of a ticket's prompt is gone than this worker computes by itself.
        """
        for load in range(1, LOADS + 1):
            with span.child("twostroke.load", blocks=len(order.ticket.blocks) if order.ticket else 0) as loading:
                prefix = await self._load(order, deadline)
                loading.set(local_blocks=prefix.local, joined_blocks=prefix.joined, loaded_blocks=prefix.loaded)
            try:
                async with aclosing(self._step(order, prefix, span)) as steps:
                    async for written in steps:
                        yield written
            except BlocksMissing:
                if load == LOADS or not prefix.blocks:
                    raise
            else:
                return

    async def _load(self, order: DecodeOrder, deadline: float | None) -> Prefix:
        terms = self._worker.terms(order.context)
        if order.ticket is not None:
            keys = [block.key for block in order.ticket.blocks]
            sizes = [block.tokens for block in order.ticket.blocks]
            return await load_prefix(self._worker, keys, sizes, order.ticket.lease, terms, deadline=deadline)
        # Without a ticket the store may still hold most of it: an answer that another worker had begun.
        size = self._worker.kv_format.block_tokens
        keys = block_keys(self._worker.root(order.context), (*order.prompt, *order.emitted)[:-1], size)
        return await self._load_alone(keys, [size] * len(keys), terms, deadline)

    async def _load_alone(
        self, keys: Sequence[bytes], sizes: Sequence[int], terms: Terms, deadline: float | None
    ) -> Prefix:
        """Load blocks that no ticket keeps, under a lease of their own until the pages hold them."""
        store = self._worker.store
        prefix = await load_prefix(self._worker, keys, sizes, store.new_lease(), terms, deadline=deadline)
        if prefix.local < len(keys):  # the store was asked, and may have opened the lease though no answer came
            store.release(prefix.lease)
        return prefix

    async def _step(self, order: DecodeOrder, prefix: Prefix, span: Span) -> AsyncGenerator[Written, None]:
        request = EngineRequest(
            id=order.context.request_id,
            prompt=order.prompt,
            emitted=order.emitted,
            root=self._worker.root(order.context),
            sampling=order.sampling,
            stops=order.stops,
            choices=(order.choice,),
            export=order.context.cache_policy.stores,
            max_uncached=None if order.ticket is None else self._recompute_tokens,
            priority=order.context.priority,
        )
        size, terms = self._worker.kv_format.block_tokens, self._worker.terms(order.context)
        stored = sum(block.tokens == size for block in order.ticket.blocks) if order.ticket else 0
        admitted: Admitted | None = None
        with span.child("twostroke.steps") as steps:
            async with self._worker.engine.submit(request) as outputs:
                async for output in outputs:
                    news = None
                    if admitted is None:
                        news = admitted = self._admitted(order, prefix, output)
                        steps.set(cached_tokens=output.cached, computed_tokens=admitted.computed)
                    self._worker.engine.release_pages([block.page for block in output.filled if block.index < stored])
                    self._publisher.offer([block for block in output.filled if block.index >= stored], terms)
                    yield Written(tokens=output.tokens, finish=output.finish, admitted=news)

    def _admitted(self, order: DecodeOrder, prefix: Prefix, output: StepOutput) -> Admitted:
        """Where the prompt's keys and values came from; of an order that was at its end already, nothing ran."""
        cached, prompt = output.cached, len(order.prompt)
        store = min(prefix.stored * self._worker.kv_format.block_tokens, cached)
        computed = prompt - min(cached, prompt) if output.computed else 0
        return Admitted(local=cached - store, store=store, computed=computed)
