"""The handoff: reuse what is stored, compute the rest, publish block by block, hand over a ticket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import takewhile

from twostroke.engine.outputs import FilledBlock, StepOutput
from twostroke.engine.sequence import EngineRequest
from twostroke.errors import TwostrokeError
from twostroke.handoff import First, Handover, PrefillOrder, Progress, Ticket
from twostroke.kv.keys import block_keys
from twostroke.kv.refs import BlockRef, Lease, Terms
from twostroke.rpc.deadline import remaining
from twostroke.telemetry import Span
from twostroke.types import CachedTokens
from twostroke.worker.loading import Prefix, load_prefix
from twostroke.worker.patience import Patience
from twostroke.worker.pulse import with_pulse
from twostroke.worker.worker import Worker

log = logging.getLogger(__name__)
PULSE_SECONDS = 10.0  # at most; a third of the lease where that is shorter
WRITER_SECONDS = 1.0  # for a block that another publication is writing: two calls and a copy
WRITES = 3  # tries to store a block, each behind the end of another writer


class Handoff:
    """Runs one order at a time per call; calls run side by side."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def run(
        self, order: PrefillOrder, deadline: float | None, span: Span
    ) -> AsyncGenerator[Progress | First | Handover, None]:
        """Yield progress, then the first tokens, then the handover. Leaving early gives everything back."""
        worker, root = self._worker, self._worker.root(order.context)
        # The last token is always computed, so a block that ends with it is never read.
        keys = block_keys(root, order.prompt[:-1], worker.kv_format.block_tokens)
        sizes = [worker.kv_format.block_tokens] * len(keys)
        with span.child("twostroke.load", blocks=len(keys)) as loading:
            lease = Lease(id=order.lease_id, seconds=worker.settings.lease_seconds)
            prefix = await load_prefix(worker, keys, sizes, lease, worker.terms(order.context), deadline=deadline)
            loading.set(local_blocks=prefix.local, joined_blocks=prefix.joined, loaded_blocks=prefix.loaded)
        publication = Publication(worker, prefix.lease, worker.terms(order.context), deadline)
        try:
            async with aclosing(self._compute(order, root, prefix, publication, span)) as events:
                async for event in events:
                    yield event
            yield publication.handover()
            publication.handed_over()  # not before: a caller that has left takes nothing over
        finally:
            publication.close()

    async def _compute(
        self, order: PrefillOrder, root: bytes, prefix: Prefix, publication: Publication, span: Span
    ) -> AsyncGenerator[Progress | First, None]:
        request = EngineRequest(
            id=order.context.request_id,
            prompt=order.prompt,
            root=root,
            sampling=order.sampling,
            stops=order.stops,
            choices=tuple(range(order.choices)),
            first_token_only=True,
            export=True,
            priority=order.context.priority,
        )
        with span.child("twostroke.compute", prompt_tokens=len(order.prompt)) as computing:
            async with self._worker.engine.submit(request) as outputs:
                async for output in with_pulse(outputs, min(PULSE_SECONDS, self._worker.settings.lease_seconds / 3)):
                    if output is None:
                        await publication.keep()
                        yield publication.progress()
                        continue
                    publication.owe(output.filled)
                    if output.tokens:
                        computing.set(cached_tokens=output.cached)
                        yield self._first(output, prefix)
                    with computing.child("twostroke.publish", blocks=len(output.filled)):
                        await publication.publish(output.computed)
                    yield publication.progress()

    def _first(self, output: StepOutput, prefix: Prefix) -> First:
        store = min(prefix.stored * self._worker.kv_format.block_tokens, output.cached)
        cached = CachedTokens(local=output.cached - store, store=store)
        return First(tuple(zip(output.tokens, output.choices, strict=True)), cached)


class Publication:
    """The blocks of one prompt on their way to the store, all under one lease."""

    def __init__(self, worker: Worker, lease: Lease, terms: Terms, deadline: float | None) -> None:
        self._worker = worker
        self._lease = lease
        self._handed_over = False
        self._terms = terms
        self._deadline = deadline
        self._patience = Patience(deadline, asyncio.get_running_loop().time)  # for all writes together
        self._owed: list[FilledBlock] = []  # lent by the engine, to be given back
        self._refs: list[BlockRef] = []  # in prompt order, without a gap
        self._computed = 0
        self._complete = True  # whether every block so far was stored

    def progress(self) -> Progress:
        """How far it is."""
        return Progress(self._computed, len(self._refs), self._lease if self._lease.opened else None)

    def owe(self, blocks: Sequence[FilledBlock]) -> None:
        """Take blocks over from the engine."""
        self._owed.extend(blocks)

    async def publish(self, computed: int) -> None:
        """Copy what is owed to the store, lease it, and give the pages back.

        A block that finds no room, or whose other writer is too slow, ends the publication: a ticket has no gaps, the
        rest is computed again.
        """
        self._computed = computed
        blocks, self._owed = self._owed, []
        try:
            if blocks and self._complete:
                self._complete = await self._write(blocks)
            else:
                await self.keep()
        finally:
            self._worker.engine.release_pages([block.page for block in blocks])

    async def _write(self, blocks: Sequence[FilledBlock]) -> bool:
        """Write blocks, or lease what others have written; answers whether the lease keeps all of them.

        Whoever reserved a block first writes it, here or in another worker. Others wait, then lease it; or write it,
        where that came to nothing.
        """
        missing, until = blocks, asyncio.get_running_loop().time() + WRITER_SECONDS
        try:
            with self._patience.waiting() as soon:
                await self._others_here_ended(missing, soon)
                for _ in range(WRITES):
                    missing, writing = await self._write_once(missing, soon)
                    if not missing or not await self._others_ended(missing, writing, until, soon):
                        break
        except TwostrokeError as error:
            log.warning("publishing failed; the ticket will name fewer blocks", extra={"reason": error.reason})
            return False
        return not missing

    async def _others_ended(
        self, blocks: Sequence[FilledBlock], writing: frozenset[bytes], until: float, deadline: float | None
    ) -> bool:
        """Wait briefly for who is writing some of these blocks; answers whether it is worth to look again.

        Args:
            blocks: what is missing.
            writing: what the store left to another writer, of this worker or of another one.
            until: when waiting for another worker ends, on the loop's clock. A look behind that still is of use: what
                a writer reserved that is gone is given to who asks next.
            deadline: of every call.
        """
        if await self._others_here_ended(blocks, deadline):
            return True
        elsewhere = [block.key for block in blocks if block.key in writing]
        seconds = until - asyncio.get_running_loop().time()
        if not elsewhere or seconds <= 0:
            return False
        await self._worker.store.await_committed(elsewhere, seconds, deadline=deadline)
        return True

    async def _others_here_ended(self, blocks: Sequence[FilledBlock], deadline: float | None) -> bool:
        seconds = remaining(deadline, at_most=WRITER_SECONDS)
        return await self._worker.writes.ended([block.key for block in blocks], at_most=seconds)

    async def _write_once(
        self, blocks: Sequence[FilledBlock], deadline: float | None
    ) -> tuple[Sequence[FilledBlock], frozenset[bytes]]:
        """Note the blocks that are stored and leased now, up to the first that is not.

        Answers the others, and which are left to another writer.
        """
        named = [(block.key, block.tokens) for block in blocks]
        pages = [block.page for block in blocks]
        writing = self._worker.store.write_blocks(self._lease, named, pages, self._terms, deadline=deadline)
        written = await self._worker.writes.begin([block.key for block in blocks], writing)
        self._lease = written.lease
        stored = {ref.key: ref for ref in written.refs}
        leading = list(takewhile(lambda block: block.key in stored, blocks))
        self._refs += [stored[block.key] for block in leading]
        return blocks[len(leading) :], written.writing

    async def keep(self) -> None:
        """Prolong the lease while the prompt waits."""
        if not self._lease.opened:
            return
        try:
            await self._worker.store.renew(self._lease, deadline=self._deadline)
        except TwostrokeError as error:
            log.warning("lease not renewed", extra={"reason": error.reason})

    def handed_over(self) -> None:
        """Leave the lease to the receiver."""
        self._handed_over = bool(self._refs)

    def handover(self) -> Handover:
        """What the receiver needs."""
        if not self._refs:
            return Handover(None)
        return Handover(
            Ticket(blocks=tuple(self._refs), lease=self._lease, format_digest=self._worker.kv_format.digest)
        )

    def close(self) -> None:
        """Give back what is still held."""
        self._worker.engine.release_pages([block.page for block in self._owed])
        self._owed = []
        if not self._handed_over:
            self._worker.store.release(self._lease)
