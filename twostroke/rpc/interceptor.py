"""The border of every servicer: the gate, and domain errors turned into statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, NoReturn

import grpc

from twostroke.errors import Cancelled, Internal, TwostrokeError
from twostroke.rpc.gate import Gate
from twostroke.rpc.status import abort

log = logging.getLogger(__name__)

# Routers keep these open for ever and ask them while we drain: they pass beside the gate, through one of their own.
_BESIDE = ("/twostroke.v1.WorkerService/", "/twostroke.v1.RouterService/GetStatus")

MAX_BESIDE = 128

Context = grpc.aio.ServicerContext[Any, Any]


class Border(grpc.aio.ServerInterceptor):
    """Wraps every handler: counted by the gate, and its TwostrokeErrors sent as statuses with details."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._beside = Gate(MAX_BESIDE)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler, wrapped."""
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc."):
            return handler
        wrap = self._streaming if handler.response_streaming else self._unary
        kind = "_".join(
            "stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming)
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            wrap(getattr(handler, kind), details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _unary(self, method: Callable[..., Awaitable[object]], name: str) -> Callable[..., Awaitable[object]]:
        async def call(request: object, context: Context) -> object:
            try:
                async with self._entered(name):
                    return await method(request, context)
            except Exception as error:  # noqa: BLE001 - every error becomes a status here, and is logged
                await self._abort(context, error, name)

        return call

    def _streaming(self, method: Callable[..., Any], name: str) -> Callable[..., AsyncIterator[object]]:
        async def call(request: object, context: Context) -> AsyncIterator[object]:
            try:
                async with self._entered(name), aclosing(method(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:  # noqa: BLE001 - every error becomes a status here, and is logged
                await self._abort(context, error, name)

        return call

    def _entered(self, name: str) -> AbstractAsyncContextManager[None]:
        return (self._beside if name.startswith(_BESIDE) else self._gate).entered()

    async def _abort(self, context: Context, error: Exception, name: str) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, asyncio.InvalidStateError | grpc.aio.UsageError) and context.cancelled():
            error = Cancelled("the caller left")  # gRPC raises these for writes on a call that has just ended
        if not isinstance(error, TwostrokeError):
            log.error("call failed", exc_info=error, extra={"method": name})
            error = Internal(f"{type(error).__name__} in {name}")
        await abort(context, error)
