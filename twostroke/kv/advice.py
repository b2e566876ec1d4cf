"""Advice to a store about blocks that it holds: evict them last, evict them first, bring them into memory.

Advice is bounded by the store, never a pin, and concerns blocks of the named namespace only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke import wire
from twostroke.kv.client import CALL_SECONDS, KvStoreClient, parts
from twostroke.kv.layout import Attachment
from twostroke.rpc.deadline import remaining
from twostroke.v1 import kvstore_pb2 as pb


@dataclass(frozen=True, slots=True)
class Kept:
    """How many leading blocks a store keeps, and for how long."""

    blocks: int
    seconds: float


class StoreAdvice:
    """Gives advice to one node. Every method raises TwostrokeError where the node cannot be reached.

    Args:
        client: of the node.
    """

    def __init__(self, client: KvStoreClient) -> None:
        self._client = client

    async def keep(
        self, namespace: str, keys: Sequence[bytes], seconds: float, *, deadline: float | None = None
    ) -> Kept:
        """Evict held leading blocks after all others of the namespace, for so long. 0 seconds end it."""
        keep_for, granted = wire.duration_pb(seconds), 0.0

        async def kept(node: Attachment, part: Sequence[bytes]) -> int:
            nonlocal granted
            request = pb.KeepRequest(incarnation=node.incarnation, namespace=namespace, keys=part, keep_for=keep_for)
            response = await self._client.stub.Keep(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
            granted = wire.seconds(response.keep_for)
            return response.kept if seconds else len(part)  # what is not kept any more is no reason to stop

        leading = await self._client.leading(kept, keys, deadline)
        return Kept(leading if seconds else 0, granted)

    async def forget(self, namespace: str, keys: Sequence[bytes], *, deadline: float | None = None) -> int:
        """Evict held blocks before all others of the namespace; answers how many."""
        forgotten = 0
        async with self._client.calls(deadline) as node:
            for part in parts(keys, node.max_keys):
                request = pb.ForgetRequest(incarnation=node.incarnation, namespace=namespace, keys=part)
                timeout = remaining(deadline, at_most=CALL_SECONDS)
                forgotten += (await self._client.stub.Forget(request, timeout=timeout)).forgotten
        return forgotten

    async def promote(self, namespace: str, keys: Sequence[bytes], *, deadline: float | None = None) -> int:
        """Bring leading blocks into the arena from the tiers below; answers how many are there now."""

        async def held(node: Attachment, part: Sequence[bytes]) -> int:
            request = pb.PromoteRequest(incarnation=node.incarnation, namespace=namespace, keys=part)
            return (await self._client.stub.Promote(request, timeout=remaining(deadline, at_most=CALL_SECONDS))).held

        return await self._client.leading(held, keys, deadline)
