"""Faults on purpose: calls that stand still, fail, wait or lie at a named moment, so that a test can strike there.

Every step of a handoff is a message of some call, so each can be hit from outside, in processes that otherwise run as
in production. Nothing here is loaded unless a server was told `--fault-points`. The contract is in faults.proto.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from twostroke.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from twostroke.rpc.interceptor import Context
from twostroke.rpc.status import abort
from twostroke.v1 import faults_pb2 as pb
from twostroke.v1 import faults_pb2_grpc
from twostroke.wire import seconds

MAX_ARMED = 64
MAX_DELAY_SECONDS = 60.0
MAX_STRIKES = 10_000
_PACKAGE = "/twostroke.v1."


class _Armed:
    """One fault, and what it has done."""

    def __init__(self, request: pb.ArmRequest) -> None:
        self.request = request
        self.disarmed = asyncio.Event()
        self.struck: asyncio.Queue[int] = asyncio.Queue()  # bounded by `strikes`
        self._skip = request.skip
        self._strikes = 0

    def takes(self, method: str, moment: pb.Moment.ValueType, message: Message) -> bool:
        """Whether this message is one to strike; counts it."""
        request = self.request
        if (request.method, request.moment) != (method, moment) or self._strikes >= max(1, request.strikes):
            return False
        if request.field and not any(field.name == request.field for field, _ in message.ListFields()):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._strikes += 1
        self.struck.put_nowait(self._strikes)
        return True

    async def strike(self, message: Message) -> None:
        """Do it. Raises Unavailable, where that is the fault."""
        match self.request.fault:
            case pb.FAULT_HOLD:
                await self.disarmed.wait()
            case pb.FAULT_DELAY:
                await asyncio.sleep(seconds(self.request.delay))
            case pb.FAULT_FAIL:
                raise Unavailable("a fault on purpose")
            case _:
                flip_a_bit(message)


class FaultBoard:
    """The faults that are armed in this process."""

    def __init__(self) -> None:
        self._armed: list[_Armed] = []

    @contextmanager
    def arm(self, request: pb.ArmRequest) -> Iterator[_Armed]:
        """Keep a fault armed inside the block. Raises Overloaded."""
        if len(self._armed) >= MAX_ARMED:
            raise Overloaded(f"{MAX_ARMED} faults are armed")
        armed = _Armed(request)
        self._armed.append(armed)
        try:
            yield armed
        finally:
            self._armed.remove(armed)
            armed.disarmed.set()

    async def reach(self, method: str, moment: pb.Moment.ValueType, message: Message) -> None:
        """A call is at this point; strike what is armed for it. Raises Unavailable."""
        for armed in tuple(self._armed):
            if armed.takes(method, moment, message):
                await armed.strike(message)


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
        if request.method not in self._methods:
            raise NotFound(f"this process serves no {request.method}", field="method")
        if request.moment == pb.MOMENT_UNSPECIFIED or request.moment not in pb.Moment.values():
            raise InvalidRequest("moment must be called or answered", field="moment")
        if request.fault == pb.FAULT_UNSPECIFIED or request.fault not in pb.Fault.values():
            raise InvalidRequest("fault must be hold, fail, delay or corrupt", field="fault")
        if request.strikes > MAX_STRIKES:
            raise InvalidRequest(f"strikes must be at most {MAX_STRIKES}", field="strikes")
        if not 0 <= seconds(request.delay) <= MAX_DELAY_SECONDS:
            raise InvalidRequest(f"delay must be at most {MAX_DELAY_SECONDS:g} s", field="delay")


def flip_a_bit(message: Message) -> bool:
    """Flip one bit of the first bytes field that is set, the message's own or a part's; says whether there is one."""
    for field, value in message.ListFields():
        parts = list(value) if field.is_repeated else [value]
        if field.type == field.TYPE_BYTES and parts[0]:
            flipped = bytes([parts[0][0] ^ 1]) + parts[0][1:]
            if field.is_repeated:
                value[0] = flipped
            else:
                setattr(message, field.name, flipped)
            return True
        if field.type == field.TYPE_MESSAGE and any(isinstance(part, Message) and flip_a_bit(part) for part in parts):
            return True
    return False
