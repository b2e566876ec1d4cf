"""The engine's asyncio face: submit requests, lend pages, look at the load. One engine thread does the work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

from twostroke.engine.backends.steps import forward_on
from twostroke.engine.cache import KvCache
from twostroke.engine.core import EngineCore
from twostroke.engine.exchange import Exchange
from twostroke.engine.models import CausalModel
from twostroke.engine.outputs import EngineLoad, FilledBlock, StepOutput
from twostroke.engine.runner import Runner
from twostroke.engine.sequence import EngineRequest
from twostroke.engine.settings import EngineSettings
from twostroke.engine.stream import Stream
from twostroke.engine.validation import Bounds
from twostroke.errors import Internal, Overloaded
from twostroke.kv.format import KvFormat
from twostroke.types import SamplingParams, StopConditions

__all__ = ["Engine", "EngineLoad", "EngineRequest", "EngineSettings", "FilledBlock", "StepOutput"]

CLOSE_SECONDS = 30.0  # a step in progress gets this long to end; budgets keep steps far shorter

_log = logging.getLogger(__name__)


class Engine:
    """One model on one device, serving many sequences. Its methods belong to the event loop that started it.

    Attributes:
        cache: the pages; those lent by `take_pages` may be written, those lent with a FilledBlock may be read.
        format: what the bytes of a page mean.
        model: the model, with its configuration.
    """

    def __init__(self, settings: EngineSettings, model: CausalModel, format: KvFormat) -> None:  # noqa: A002 - its name
        self.cache = KvCache(format, settings.pages, model.backend.device)
        self.format = format
        self.model = model
        self._bounds = Bounds(
            vocab_size=model.config.vocab_size,
            context=model.config.max_positions,
            page_tokens=format.block_tokens,
            pages=settings.pages - 1,
        )
        self._most_open = settings.max_running + settings.max_waiting
        self._numbers = count()
        attention = model.backend.attention(self.cache, model.config.attention)
        forward = forward_on(
            model,
            attention,
            graphs=settings.graphs,
            most_rows=settings.max_running,
            most_tokens=settings.tokens_per_step,
            row_pages=min(self._bounds.pages, -(-self._bounds.context // format.block_tokens)),
        )
        self._runner = Runner(model, self.cache, forward)
        core = EngineCore(settings, self._bounds, model.config.end_token_ids, self._runner)
        self._exchange = Exchange(core, model.backend.torch_threads)

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        settings: EngineSettings,
        model: CausalModel,
        format: KvFormat,  # noqa: A002 - its name
    ) -> AsyncIterator[Engine]:
        """Run an engine for the length of the block, ready on entry; leaving takes bounded time.

        A tiny generation goes through the model first, so that a model that computes no numbers fails here. On leaving,
        sequences that are still open get Unavailable.

        Raises:
            Internal: the warm-up failed, or memory has no room for the pages.
        """
        engine = cls(settings, model, format)
        engine._warn_if_small()
        await engine.cache.take_memory()
        await asyncio.to_thread(engine._runner.prepare)  # nothing else uses the runner yet
        engine._exchange.start()
        try:
            await engine._warm_up()
            yield engine
        finally:
            await engine._exchange.close(CLOSE_SECONDS)

    @asynccontextmanager
    async def submit(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[StepOutput]]:
        """Run a request for the length of the block; leaving it, for any reason, frees all that the sequence holds.

        The iterator ends after the last output. Outputs gather while none is awaited. Blocks taken with an output stay
        lent to the caller; those not taken come back by themselves.

        Raises:
            InvalidRequest: a field is out of range (on entry).
            ContextTooLong: the request can never fit (on entry).
            Overloaded: too many wait (on entry, or from the iterator).
            BlocksMissing: more than `max_uncached` tokens would have to be computed (from the iterator).
            Internal: the step, the logits or the engine failed (from the iterator).
            Unavailable: the engine is closed.
        """
        self._exchange.require_running()
        self._bounds.check(request)
        if self._exchange.open_streams >= self._most_open:
            raise Overloaded(f"{self._most_open} requests are open; no more are taken")
        number, stream = next(self._numbers), Stream()
        self._exchange.connect(number, stream)
        self._exchange.do(lambda core: core.submit(number, request))
        try:
            yield stream
        finally:
            self._exchange.disconnect(number)
            if not stream.ended:
                self._exchange.do(lambda core: core.cancel(number))
            self.release_pages(stream.discard())

    def load(self) -> EngineLoad:
        """How things stood after the engine's last step; `busy` counts commands since then too."""
        load = self._exchange.load
        return replace(load, busy=load.busy or self._exchange.pending)

    async def take_pages(self, count: int, *, behind: Sequence[bytes] = ()) -> list[int]:
        """Borrow up to `count` pages to fill: fewer, or none, when memory is short. Does not wait for memory.

        Cached blocks named by `behind`, whose prefix the new ones go on, are not evicted for it.
        Each ends in `adopt_pages` or `release_pages`.
        """
        taking = self._exchange.ask(lambda core: core.lend_pages(count, behind))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back_untaken)
            raise

    async def adopt_pages(self, blocks: Sequence[tuple[int, bytes, int]]) -> None:
        """Give back borrowed pages that now hold blocks: they become cached, shared by key, and evictable.

        Args:
            blocks: (page, key, tokens), in the order of their sequence.

        Raises:
            Internal: a page was not borrowed.
        """
        await self._exchange.ask(lambda core: core.loans.adopt(blocks))

    def release_pages(self, pages: Sequence[int]) -> None:
        """Give back pages: borrowed ones that were not filled, or those of FilledBlocks once their copy has ended."""
        self._exchange.give_back(pages)

    async def cached_blocks(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are in pages right now; pins nothing."""
        return await self._exchange.ask(lambda core: core.cached_blocks(keys))

    async def idle(self) -> None:
        """Return once no sequence is here and every command so far was carried out."""
        await self._exchange.idle()

    async def watch(self) -> None:
        """Return when the engine is closed.

        Raises:
            Internal: its thread died; the process should end and say so.
        """
        reason = await asyncio.shield(self._exchange.ended)
        if isinstance(reason, Internal):
            raise reason

    async def _warm_up(self) -> None:
        """Generate two tokens, too few to leave anything in the cache."""
        request = EngineRequest(
            id="warm-up",
            prompt=(self.model.config.bos_token_id or 0,),
            root=b"warm-up",
            sampling=SamplingParams(temperature=0.0),
            stops=StopConditions(max_tokens=2, ignore_eos=True),
        )
        async with self.submit(request) as outputs:
            async for _ in outputs:
                pass

    def _warn_if_small(self) -> None:
        room, context = self._bounds.pages * self._bounds.page_tokens, self._bounds.context
        if room < context:
            _log.warning("%d pages hold %d tokens; the model's context is %d", self._bounds.pages, room, context)

    def _give_back_untaken(self, taking: asyncio.Future[list[int]]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self.release_pages(taking.result())
