"""Domain errors and gRPC statuses, both ways: google.rpc.ErrorInfo in the status details."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from twostroke.errors import (
    DOMAIN,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TooLarge,
    TwostrokeError,
    Unauthenticated,
    Unavailable,
    WorkerLost,
    by_reason,
)

DETAILS = "grpc-status-details-bin"

# For statuses that carry no ErrorInfo of ours: they come from gRPC itself or from another server.
_BY_CODE: dict[grpc.StatusCode, type[TwostrokeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


async def abort(context: grpc.aio.ServicerContext[object, object], error: TwostrokeError) -> NoReturn:
    """End the call with the error's status and details."""
    info = ErrorInfo(reason=error.reason, domain=DOMAIN, metadata={"cure": error.cure})
    if error.field is not None:
        info.metadata["field"] = error.field
    if error.retry_after is not None:
        info.metadata["retry_after_seconds"] = f"{error.retry_after:g}"
    status = Status(code=error.code.value[0], message=error.message)
    status.details.add().Pack(info)
    await context.abort(error.code, error.message, ((DETAILS, status.SerializeToString()),))
    raise AssertionError("abort always raises")


def from_rpc_error(error: grpc.aio.AioRpcError, *, lost: type[Unavailable] = WorkerLost) -> TwostrokeError:
    """The domain error behind a failed call; `lost` when the connection failed, not the call."""
    message = error.details() or error.code().name.lower()
    info = _error_info(error)
    if info is not None and (kind := by_reason().get(info.reason)) is not None:
        return kind(message, field=info.metadata.get("field"), retry_after=_seconds(info))
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        # Without our details the transport failed: nobody there, or it went away in the middle. Our own cancellations
        # are no errors of a call: they end the task that awaits it.
        return lost(f"the connection failed: {message}")
    return _BY_CODE.get(error.code(), Internal)(message)


def _seconds(info: ErrorInfo) -> float | None:
    """When to come back; None where that is not said, or not in a way that can be read."""
    try:
        return max(0.0, float(info.metadata["retry_after_seconds"]))
    except (KeyError, ValueError):
        return None


def _error_info(error: grpc.aio.AioRpcError) -> ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS or not isinstance(value, bytes):
            continue
        try:
            status = Status.FromString(value)
        except DecodeError:
            return None
        for detail in status.details:
            info = ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    return None


@contextmanager
def domain_errors(*, lost: type[Unavailable] = WorkerLost) -> Iterator[None]:
    """Turn gRPC errors that leave the block into domain errors; `lost` is what a failed connection means."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, lost=lost) from error
    except grpc.aio.UsageError as error:  # the channel was closed under the call
        raise Unavailable(str(error)) from error
