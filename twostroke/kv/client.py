"""KvStoreClient: control calls to a host's KV block store. It moves names and leases; bytes are `kv.blocks`' business.

The client attaches by itself, and again after the node has restarted. A node that cannot be reached fails each call
quickly with Unavailable: callers compute instead of waiting.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Self

import grpc

from twostroke import wire
from twostroke.errors import DeadlineExceeded, FormatMismatch, NotFound, TwostrokeError, Unavailable, WorkerLost
from twostroke.kv import messages
from twostroke.kv.format import KvFormat
from twostroke.kv.layout import Attachment
from twostroke.kv.refs import Lease
from twostroke.rpc.channel import connect
from twostroke.rpc.deadline import remaining
from twostroke.rpc.status import domain_errors
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

log = logging.getLogger(__name__)

CALL_SECONDS = 2.0  # bound on a control call that the store answers from memory
ATTACH_SECONDS = 1.0  # for an introduction: whoever asks meanwhile waits for it
RETRY_SECONDS = 0.2  # between tries to attach; calls in between fail at once
SILENT_SECONDS = 2.0  # the same, after a node that was attached did not answer
CLOCK_SECONDS = 0.1  # by which clocks here and in gRPC may differ about the end of a call

Count = Callable[[Attachment, Sequence[bytes]], Awaitable[int]]  # leading keys of those of one call


class KvStoreClient:
    """One connection to one store node.

    Args:
        channel: to the node; closed by `connect`.
        kv_format: answers the format of the blocks as soon as it is known.
        writes: whether to attach as a writer, each time under a new name.
    """

    def __init__(
        self, channel: grpc.aio.Channel, kv_format: Callable[[], KvFormat | None], *, writes: bool = False
    ) -> None:
        self.stub = KvStoreServiceStub(channel)
        self._channel = channel
        self._kv_format = kv_format
        self._writes = writes
        self._attachment: Attachment | None = None
        self._address = ""
        self._attaching = asyncio.Lock()
        self._retry_at = 0.0  # on the loop's clock
        self._releasing: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str, kv_format: Callable[[], KvFormat | None]) -> AsyncIterator[Self]:
        """Use the node at `address` inside the block. It need not be there yet."""
        client = cls(connect(address), kv_format)
        try:
            yield client
        finally:
            await client.close()

    async def close(self) -> None:
        """End the connection, behind all that was left to be done."""
        await self.released()
        await self._channel.close()

    async def attached(self, deadline: float | None = None) -> Attachment:
        """What the node said when we introduced ourselves; asks again after it has restarted.

        Raises: Unavailable; DeadlineExceeded; FormatMismatch, when the node holds blocks of another format.
        """
        if self._attachment is not None:
            return self._attachment
        try:
            async with asyncio.timeout_at(deadline), self._attaching:
                if self._attachment is None:
                    self._attachment = await self._attach()
                    self._address = self._attachment.address
                    log.info("attached to the store", extra={"incarnation": self._attachment.incarnation})
                return self._attachment
        except TimeoutError as error:
            raise DeadlineExceeded("the request's time is up") from error

    async def usable(self, deadline: float | None) -> Attachment:
        """The attached node; one with blocks of another format is as good as none. Raises Unavailable."""
        try:
            return await self.attached(deadline)
        except FormatMismatch as error:
            raise Unavailable(f"the store holds blocks of another format: {error.message}") from error

    async def _attach(self) -> Attachment:
        kv_format, clock = self._kv_format(), asyncio.get_running_loop().time
        if kv_format is None:
            raise Unavailable("the block format is not known yet")
        if clock() < self._retry_at:
            raise Unavailable("the store could not be reached a moment ago", retry_after=RETRY_SECONDS)
        writer_id = secrets.token_hex(8) if self._writes else ""
        request = pb.AttachRequest(format=wire.kv_format_pb(kv_format), writer_id=writer_id)
        try:
            with domain_errors():
                response = await self.stub.Attach(request, timeout=ATTACH_SECONDS)
        except TwostrokeError as error:
            self._retry_at = clock() + RETRY_SECONDS
            if isinstance(error, DeadlineExceeded):  # the bound of the call, not the caller's time
                raise Unavailable("the store does not answer") from error
            raise
        return messages.attachment(response, writer_id)

    @property
    def address(self) -> str:
        """Where other hosts reach the node; empty until we have attached once."""
        return self._address

    def is_elsewhere(self, lease: Lease) -> bool:
        """Whether a lease is open at another node than ours."""
        return lease.opened and bool(self._address) and lease.address != self._address

    def is_attached(self, node: Attachment) -> bool:
        """Whether calls still go to this very node."""
        return self._attachment is node

    def forget(self, node: Attachment) -> None:
        """Attach anew before the next call."""
        if self._attachment is node:
            self._attachment = None

    async def lookup(
        self,
        keys: Sequence[bytes],
        lease: Lease | None = None,
        *,
        anywhere: bool = False,
        deadline: float | None = None,
    ) -> int:
        """How many leading keys the store holds, as the lease sees it, or can bring in. Raises TwostrokeError."""
        lease_id = lease.id if lease else ""  # of another node, or an earlier life of this one: adds nothing

        async def held(node: Attachment, part: Sequence[bytes]) -> int:
            request = pb.LookupRequest(incarnation=node.incarnation, keys=part, lease_id=lease_id, anywhere=anywhere)
            return (await self.stub.Lookup(request, timeout=remaining(deadline, at_most=CALL_SECONDS))).held

        return await self.leading(held, keys, deadline)

    async def await_committed(self, keys: Sequence[bytes], at_most: float, *, deadline: float | None = None) -> int:
        """Wait until the store holds all keys; answers how many leading ones it holds.

        Returns early when there is nothing to wait for: a block was lost (its writer gave up) and none is being
        written. Waits at most so many seconds, of which the node may grant less.

        Raises: Overloaded, when too many calls wait; TwostrokeError.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + at_most

        async def held(node: Attachment, part: Sequence[bytes]) -> int:
            wait = max(0.0, end - clock())
            request = pb.AwaitRequest(incarnation=node.incarnation, keys=part, at_most=wire.duration_pb(wait))
            timeout = remaining(deadline, at_most=wait + CALL_SECONDS)
            return (await self.stub.Await(request, timeout=timeout)).held

        return await self.leading(held, keys, deadline)

    async def leading(self, count: Count, keys: Sequence[bytes], deadline: float | None) -> int:
        """Count leading keys in as many calls as they take; a node that has restarted is asked anew.

        Raises: TwostrokeError.
        """
        try:
            return await self._counted(count, keys, deadline)
        except WorkerLost as error:
            if error.field != "incarnation":
                raise
            return await self._counted(count, keys, deadline)

    async def _counted(self, count: Count, keys: Sequence[bytes], deadline: float | None) -> int:
        total = 0
        async with self.calls(deadline) as node:
            for part in parts(keys, node.max_keys):
                found = await count(node, part)
                total += found
                if found < len(part):
                    break
        return total

    async def renew(self, lease: Lease, *, deadline: float | None = None) -> None:
        """Prolong a lease. Raises NotFound, when it has ended."""
        async with self.calls(deadline, lease) as node:
            request = pb.RenewRequest(
                incarnation=node.incarnation, lease_ids=[lease.id], lease_duration=wire.duration_pb(lease.seconds)
            )
            response = await self.stub.Renew(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
        if lease.id not in response.alive:
            raise NotFound("the lease has ended", field="lease_id")

    def release(self, lease: Lease) -> None:
        """End a lease, in a task of the client's own: whoever lets go may itself be about to be cancelled.

        Trouble is logged: what is not released ends by time.
        """
        self._behind(self._release(lease), name="release")

    def _behind(self, work: Coroutine[None, None, None], *, name: str) -> None:
        """Do what nobody waits for, in a task that `released` waits for."""
        task = asyncio.create_task(work, name=name)
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def released(self) -> None:
        """Return when all that was left behind so far is done; bounded by the time limit of a call."""
        if self._releasing:
            await asyncio.wait(self._releasing)

    async def _release(self, lease: Lease) -> None:
        try:
            async with self.calls(None, lease) as node:
                request = pb.ReleaseRequest(incarnation=node.incarnation, lease_ids=[lease.id])
                await self.stub.Release(request, timeout=CALL_SECONDS)
        except TwostrokeError as error:
            log.info("lease left to end by time", extra={"reason": error.reason})

    @asynccontextmanager
    async def calls(self, deadline: float | None, lease: Lease | None = None) -> AsyncIterator[Attachment]:
        """Make calls to the attached node inside the block.

        Raises: NotFound, when `lease` is of an earlier life of the node; Unavailable.
        """
        node = await self.usable(deadline)
        with self.calls_to(node, lease):
            yield node

    @contextmanager
    def calls_to(self, node: Attachment, lease: Lease | None = None, seconds: float = CALL_SECONDS) -> Iterator[None]:
        """Make calls to this very node inside the block, with gRPC's errors turned into ours.

        A node that has restarted is forgotten, so that whoever asks next attaches anew; a lease of another life may be
        the first we hear of that. So is one that is silent for as many `seconds` as a call may take, and calls fail at
        once for a while: else each caller would wait that long again.

        Raises: NotFound, when `lease` is of another life of the node; WorkerLost, when the node is; Unavailable, when
            the node is silent.
        """
        if lease is not None and lease.opened and lease.incarnation != node.incarnation:
            self.forget(node)
            raise NotFound("the lease is of another life of the store", field="lease_id")
        clock = asyncio.get_running_loop().time
        silent_at = clock() + seconds - CLOCK_SECONDS
        try:
            with domain_errors():
                yield
        except WorkerLost:
            self.forget(node)
            raise
        except DeadlineExceeded as error:
            if clock() < silent_at:  # the caller's own time is up
                raise
            self.forget(node)
            self._retry_at = clock() + SILENT_SECONDS
            raise Unavailable("the store does not answer", retry_after=SILENT_SECONDS) from error


def parts(keys: Sequence[bytes], most: int) -> Iterator[Sequence[bytes]]:
    """Cut keys into calls."""
    return (keys[start : start + most] for start in range(0, len(keys), most))
