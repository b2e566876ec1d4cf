"""RouterService: protobuf to domain and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import grpc

from services.router.access import Access
from services.router.dispatch import Dispatch
from services.router.fleet import Fleet
from services.router.member import Member
from services.router.settings import DispatchSettings
from twostroke import wire
from twostroke.access.bearer import values_in
from twostroke.errors import InvalidRequest
from twostroke.rpc.deadline import deadline_of
from twostroke.rpc.gate import Gate
from twostroke.rpc.interceptor import Context
from twostroke.telemetry import traceparent_of
from twostroke.types import Advice, Advised
from twostroke.v1 import router_pb2, router_pb2_grpc
from twostroke.wire import advice as advice_wire
from twostroke.wire import worker as worker_wire


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """The gRPC door."""

    full_name = "twostroke.v1.RouterService"

    def __init__(
        self, dispatch: Dispatch, fleet: Fleet, gate: Gate, access: Access, settings: DispatchSettings
    ) -> None:
        self._dispatch = dispatch
        self._fleet = fleet
        self._gate = gate
        self._access = access
        self._settings = settings

    def register(self, server: grpc.aio.Server) -> None:
        """Join a server."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Stream an answer."""
        metadata = context.invocation_metadata()
        wanted = wire.generate_request(request, self._access.caller(values_in(metadata)))
        wanted = replace(wanted, traceparent=traceparent_of(metadata))
        deadline = self._deadline(context)
        async with aclosing(self._dispatch.generate(wanted, deadline)) as events:
            async for event in events:
                yield wire.event_pb(event, output=request.output)

    async def KeepPrompt(
        self, request: router_pb2.KeepPromptRequest, context: Context
    ) -> router_pb2.KeepPromptResponse:
        """Have a prompt's blocks evicted last."""
        if not request.HasField("keep_for"):
            raise InvalidRequest("keep_for is required", field="keep_for")
        advised = await self._advise(Advice.KEEP, request.prompt, context, wire.seconds(request.keep_for))
        granted = None if advised.keep_for is None else wire.duration_pb(advised.keep_for)
        return router_pb2.KeepPromptResponse(advised=advice_wire.advised_pb(advised), keep_for=granted)

    async def ReleasePrompt(
        self, request: router_pb2.ReleasePromptRequest, context: Context
    ) -> router_pb2.ReleasePromptResponse:
        """Have a prompt's blocks evicted first."""
        advised = await self._advise(Advice.RELEASE, request.prompt, context)
        return router_pb2.ReleasePromptResponse(advised=advice_wire.advised_pb(advised))

    async def PrefetchPrompt(
        self, request: router_pb2.PrefetchPromptRequest, context: Context
    ) -> router_pb2.PrefetchPromptResponse:
        """Have a prompt's blocks brought into memory."""
        advised = await self._advise(Advice.PREFETCH, request.prompt, context)
        return router_pb2.PrefetchPromptResponse(advised=advice_wire.advised_pb(advised))

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """List the model served."""
        model = self._fleet.model
        return router_pb2.ListModelsResponse(models=[worker_wire.model_info_pb(model.info)] if model else [])

    async def GetStatus(self, request: router_pb2.GetStatusRequest, context: Context) -> router_pb2.GetStatusResponse:
        """Say how the cluster is."""
        reason = "draining" if self._gate.closed else self._fleet.readiness
        return router_pb2.GetStatusResponse(
            ready=reason is None,
            reason=reason or "",
            workers=[_status(member) for member in self._fleet.members],
            open_requests=self._gate.open_calls,
        )

    async def _advise(
        self, advice: Advice, prompt: router_pb2.StoredPrompt, context: Context, keep_for: float | None = None
    ) -> Advised:
        metadata = context.invocation_metadata()
        wanted = advice_wire.stored_prompt(prompt, self._access.caller(values_in(metadata)), keep_for)
        wanted = replace(wanted, traceparent=traceparent_of(metadata))
        return await self._dispatch.advise(advice, wanted, self._deadline(context))

    def _deadline(self, context: Context) -> float:
        loop = asyncio.get_running_loop()
        return deadline_of(context, loop) or loop.time() + self._settings.request_seconds


def _status(member: Member) -> router_pb2.WorkerStatus:
    return router_pb2.WorkerStatus(
        address=member.address,
        info=worker_wire.worker_info_pb(member.info) if member.info else None,
        load=worker_wire.load_pb(member.load),
        available=member.available,
    )
