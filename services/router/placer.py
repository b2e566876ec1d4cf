"""The placer: applies the placement policy to the fleet as it is now, and remembers what went where."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from services.router.fleet import Fleet
from services.router.member import Member
from services.router.prompt import Prompt
from twostroke.cluster import Role
from twostroke.errors import Overloaded, Unavailable
from twostroke.routing.index import PrefixIndex
from twostroke.routing.placement import Candidate, Score, rank_decode, rank_prefill
from twostroke.telemetry import Span

SOON_SECONDS = 1.0


class Placer:
    """Chooses workers. Waits for one when there is none."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, wait_seconds: float) -> None:
        self._fleet = fleet
        self._index = index
        self._wait_seconds = wait_seconds
        self._decisions = count(1)
        self._held = 0  # choices of open requests

    @contextmanager
    def admitted(self, choices: int) -> Iterator[None]:
        """Hold room for a request's choices, in both kinds of worker, for the length of the block.

        Raises: Overloaded, at once, when the workers that are there could not take them all.
        """
        room = [capacity for role in Role if (capacity := self._capacity(role)) is not None]
        if room and self._held + choices > min(room):
            raise Overloaded(f"{self._held} answers are being written; no more are taken", retry_after=1)
        self._held += choices
        try:
            yield
        finally:
            self._held -= choices

    def _capacity(self, role: Role) -> int | None:
        """Sequences that the available workers of a kind may have open; None when there is none: requests wait."""
        members = self._fleet.available(role)
        return sum(member.info.max_open for member in members if member.info) if members else None

    def has(self, role: Role, avoid: set[str]) -> bool:
        """Whether a worker of this kind could be chosen at once."""
        return bool(self._candidates(role, avoid))

    async def place(self, role: Role, prompt: Prompt, stored_blocks: int, avoid: set[str], span: Span) -> Member:
        """The best available worker, noted as chosen.

        Args:
            role: prefill or decode.
            prompt: what is to be run.
            stored_blocks: leading blocks of the prompt that the store holds.
            avoid: incarnations that failed this request already.
            span: gets a child for the wait, if there is one, and one for the decision.

        Raises: Unavailable, when none comes in time.
        """
        members = self._candidates(role, avoid)
        if not members:
            with span.child("twostroke.queue", reason=f"no {role.value} worker is available"):
                members = await self._await_candidates(role, avoid)
        with span.child("twostroke.place", role=role.value) as placing:
            scores = self._rank(role, members, prompt, stored_blocks)
            chosen = next(member for member in members if member.address == scores[0].worker)
            chosen.last_chosen = next(self._decisions)
            placing.set(worker=chosen.address, candidates=[_shown(score) for score in scores])
        self._index.record(chosen.address, prompt.keys)
        return chosen

    def _candidates(self, role: Role, avoid: set[str]) -> list[Member]:
        return [
            member
            for member in self._fleet.available(role)
            if member.info is not None and member.info.incarnation not in avoid
        ]

    async def _await_candidates(self, role: Role, avoid: set[str]) -> list[Member]:
        """Wait for a worker; one that failed this request is tried again when no other comes soon."""
        for avoided, seconds in ((avoid, min(SOON_SECONDS, self._wait_seconds)), (set[str](), self._wait_seconds)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not (members := self._candidates(role, avoided)):
                        await self._fleet.changed()
                    return members
        raise Unavailable(f"no {role.value} worker is available", retry_after=2)

    def _rank(self, role: Role, members: Sequence[Member], prompt: Prompt, stored_blocks: int) -> list[Score]:
        size = members[0].info.kv_format.block_tokens if members[0].info else 1
        candidates = [
            Candidate(
                worker=member.address,
                load=member.load,
                pending_tokens=member.pending_tokens,
                open_streams=member.open_streams,
                matched_tokens=self._index.matched(member.address, prompt.keys) * size,
                last_chosen=member.last_chosen,
            )
            for member in members
        ]
        if role is Role.PREFILL:
            return rank_prefill(candidates, len(prompt.ids), stored_blocks * size)
        return rank_decode(candidates, len(prompt.ids), size)


def _shown(score: Score) -> str:
    return f"{score.worker} {score.total:.0f} = {score.queued:.0f} queued + {score.compute:.0f} + {score.load:.0f} load"
