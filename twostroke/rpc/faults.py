"""Faults on purpose: calls that stand still, fail, wait or lie at a named moment, so that a test can strike there.

Every step of a handoff is a message of some call, so each can be hit from outside, in processes that otherwise run as
in production; a service may name operations that are points too. Nothing here is loaded unless a server was told
`--fault-points`. The contract is in faults.proto.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from twostroke.errors import InvalidRequest, NotFound, Unavailable
from twostroke.rpc.faultboard import FaultBoard
from twostroke.rpc.interceptor import Context
from twostroke.rpc.status import abort
from twostroke.v1 import faults_pb2 as pb
from twostroke.v1 import faults_pb2_grpc
from twostroke.wire import seconds

MAX_DELAY_SECONDS = 60.0
MAX_STRIKES = 10_000
_PACKAGE = "/twostroke.v1."


class FaultPoints(grpc.aio.ServerInterceptor):
    """Makes the coming of each request, and the leaving of each message, a point. Only a guard stands further out."""

    def __init__(self, board: FaultBoard) -> None:
        self._board = board

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler, wrapped; that of a stream of requests is struck at its answer only."""
        handler = await continuation(details)
        method = details.method.removeprefix(_PACKAGE)
        if handler is None or method == details.method or method.startswith("FaultService/"):
            return handler
        kind = "_".join(
            "stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming)
        )
        wrap = self._streaming if handler.response_streaming else self._unary
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            wrap(getattr(handler, kind), method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _unary(self, method: Callable[..., Awaitable[Message]], name: str) -> Callable[..., Awaitable[Message]]:
        async def call(request: object, context: Context) -> Message:
            await self._reach(name, pb.MOMENT_CALLED, request, context)
            response = await method(request, context)
            await self._reach(name, pb.MOMENT_ANSWERED, response, context)
            return response

        return call

    def _streaming(self, method: Callable[..., Any], name: str) -> Callable[..., AsyncIterator[Message]]:
        async def call(request: object, context: Context) -> AsyncIterator[Message]:
            await self._reach(name, pb.MOMENT_CALLED, request, context)
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    await self._reach(name, pb.MOMENT_ANSWERED, response, context)
                    yield response

        return call

    async def _reach(self, name: str, moment: pb.Moment.ValueType, message: object, context: Context) -> None:
        if not isinstance(message, Message):
            return
        try:
            await self._board.reach(name, moment, message)
        except Unavailable as error:
            await abort(context, error)


class FaultService(faults_pb2_grpc.FaultServiceServicer):
    """Arms faults."""

    full_name = pb.DESCRIPTOR.services_by_name["FaultService"].full_name

    def __init__(self, board: FaultBoard, services: Iterable[str]) -> None:
        self._board = board
        pool = descriptor_pool.Default()
        self._methods = frozenset(
            f"{name}/{method.name}".removeprefix(_PACKAGE[1:])
            for name in services
            for method in pool.FindServiceByName(name).methods
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Join a server."""
        faults_pb2_grpc.add_FaultServiceServicer_to_server(self, server)

    async def Arm(self, request: pb.ArmRequest, context: Context) -> AsyncIterator[pb.ArmResponse]:
        """Keep a fault armed while the call is open."""
        self._check(request)
        with self._board.arm(request) as armed:
            yield pb.ArmResponse()
            while True:
                yield pb.ArmResponse(strike=await armed.struck.get())

    def _check(self, request: pb.ArmRequest) -> None:
        is_operation = request.method in self._board.operations
        if not is_operation and request.method not in self._methods:
            raise NotFound(f"this process serves no {request.method}", field="method")
        if request.moment == pb.MOMENT_UNSPECIFIED or request.moment not in pb.Moment.values():
            raise InvalidRequest("moment must be called or answered", field="moment")
        if request.fault == pb.FAULT_UNSPECIFIED or request.fault not in pb.Fault.values():
            raise InvalidRequest("fault must be hold, fail, delay, corrupt or full", field="fault")
        if request.fault == pb.FAULT_FULL and not is_operation:
            raise InvalidRequest("only an operation on a disk can find it full", field="fault")
        if request.field and is_operation:
            raise InvalidRequest("an operation has no fields", field="field")
        if request.strikes > MAX_STRIKES:
            raise InvalidRequest(f"strikes must be at most {MAX_STRIKES}", field="strikes")
        if not 0 <= seconds(request.delay) <= MAX_DELAY_SECONDS:
            raise InvalidRequest(f"delay must be at most {MAX_DELAY_SECONDS:g} s", field="delay")
