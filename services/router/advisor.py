"""The advisor: what callers advise about stored blocks goes to the store.

Nothing that happens there is a caller's error: advice that the store does not take is good for no block.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.router.metrics import Metrics
from services.router.prompt import Prompt
from services.router.stores import Stores
from twostroke.errors import Overloaded, TwostrokeError
from twostroke.kv.advice import Kept, StoreAdvice
from twostroke.kv.client import KvStoreClient
from twostroke.types import Advice, GenerateRequest

log = logging.getLogger(__name__)

KEEP_SECONDS = 0.5  # for advice that an answer's end waits for, wait for its last blocks included
PUBLISH_SECONDS = 0.25  # for blocks that decode publishes behind its steps


class Advisor:
    """Passes advice on, for the caller's namespace only: keys are made of it, and the store compares it as well.

    Args:
        stores: all of which are advised.
        metrics: counts.
        calls: that one namespace may have open.
    """

    def __init__(self, stores: Stores, metrics: Metrics, calls: int) -> None:
        self._stores = stores
        self._metrics = metrics
        self._calls = calls
        self._open: Counter[str] = Counter()  # calls by namespace

    @contextmanager
    def admitted(self, namespace: str) -> Iterator[None]:
        """Hold room for one call. Raises Overloaded, at once, when the namespace has too many open."""
        if self._open[namespace] >= self._calls:
            raise Overloaded(f"{self._calls} calls about stored prompts are open in this namespace", retry_after=1)
        self._open[namespace] += 1
        try:
            yield
        finally:
            self._open[namespace] -= 1
            if not self._open[namespace]:
                del self._open[namespace]

    async def advise(
        self, advice: Advice, namespace: str, keys: Sequence[bytes], seconds: float, deadline: float
    ) -> Kept | None:
        """For how many blocks the advice was good, and for how long, at the node where it was good for most.

        None when no node took it.
        """

        async def give(node: KvStoreClient) -> Kept:
            store = StoreAdvice(node)
            match advice:
                case Advice.KEEP:
                    return await store.keep(namespace, keys, seconds, deadline=deadline)
                case Advice.RELEASE:
                    return Kept(await store.forget(namespace, keys, deadline=deadline), 0.0)
                case Advice.PREFETCH:
                    return Kept(await store.promote(namespace, keys, deadline=deadline), 0.0)

        try:
            done = max(await self._stores.answers(give), key=lambda kept: kept.blocks, default=None)
        except TwostrokeError as error:
            log.info("advice not taken", extra={"advice": advice.value, "reason": error.reason})
            self._metrics.advised(advice, error.reason.lower(), 0)
            return None
        blocks = done.blocks if done else 0
        outcome = "none" if not blocks else "all" if blocks == len(keys) else "some"
        self._metrics.advised(advice, outcome, blocks)
        return done

    async def published(self, keys: Sequence[bytes], deadline: float) -> None:
        """Wait briefly until the nodes have blocks that are on their way to them."""
        try:
            await self._stores.answers(lambda node: node.await_committed(keys, PUBLISH_SECONDS, deadline=deadline))
        except TwostrokeError as error:
            log.info("blocks not awaited", extra={"reason": error.reason})


class Retention:
    """What one request asked to keep beyond its end; where it asked for nothing, nothing is done."""

    def __init__(self, advisor: Advisor, request: GenerateRequest, prompt: Prompt) -> None:
        self._advisor = advisor
        self._context = request.context
        self._seconds = request.keep_for
        self._prompt = prompt

    async def prompt_stored(self) -> None:
        """Keep the prompt's blocks while the answer is written, which may take longer than they are left alone."""
        if self._seconds is not None:
            await self._keep(self._prompt.keys, self._seconds, _soon())

    async def answered(self, emitted: Sequence[Sequence[int]]) -> int | None:
        """Keep the blocks of the prompt and of each choice from now on; answers how many are kept."""
        if self._seconds is None:
            return None
        deadline = _soon()
        chains = [self._prompt.keys]
        if self._context.cache_policy.stores:
            chains = [self._prompt.keys_with(tokens) for tokens in emitted]
            await self._advisor.published(list(dict.fromkeys(key for keys in chains for key in keys)), deadline)
        kept: set[bytes] = set()
        for keys in chains:
            kept.update(keys[: await self._keep(keys, self._seconds, deadline)])
        return len(kept)

    async def _keep(self, keys: Sequence[bytes], seconds: float, deadline: float) -> int:
        done = await self._advisor.advise(Advice.KEEP, self._context.namespace, keys, seconds, deadline)
        return done.blocks if done else 0


def _soon() -> float:
    return asyncio.get_running_loop().time() + KEEP_SECONDS
