"""The guard of the gRPC door: nobody unknown gets further, whatever the method."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from services.router.access import Access
from twostroke.access.bearer import values_in
from twostroke.errors import Unauthenticated
from twostroke.rpc.interceptor import Context
from twostroke.rpc.status import abort

# Balancers and container health checks have no key.
PUBLIC = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})


class Guard(grpc.aio.ServerInterceptor):
    """Refuses every call without a known key, before its message is read, also of methods that do not exist."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a caller that is known, else one that refuses."""
        if details.method not in PUBLIC:
            try:
                self._access.caller(values_in(details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(details)


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:  # noqa: ARG001 - they stay unread
        await abort(context, error)

    # Every kind of call can be answered as one of streams, and only such a handler starts before a message has come.
    return grpc.stream_stream_rpc_method_handler(refuse)
