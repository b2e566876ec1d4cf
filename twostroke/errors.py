"""The error tree. Each class owns its reason, gRPC code, HTTP status, retry hint and cure.

TwostrokeError
├── InvalidRequest            INVALID_ARGUMENT    400  the caller must change something; `field` says what
│   ├── ContextTooLong        INVALID_ARGUMENT    400  prompt (+ max_tokens) beyond the model's context
│   └── TooLarge              RESOURCE_EXHAUSTED  413  a message or body over its limit
├── Unauthenticated           UNAUTHENTICATED     401  no API key, or one that is not known
├── PermissionDenied          PERMISSION_DENIED   403  the API key does not allow what `field` asks for
├── NotFound                  NOT_FOUND           404  no such model, request, lease
├── FormatMismatch            FAILED_PRECONDITION 409  two parties disagree on a KvFormat field
├── Overloaded                RESOURCE_EXHAUSTED  429  a bound was reached; retry after a while
├── Unavailable               UNAVAILABLE         503  not ready, draining, or the last worker is gone
│   ├── WorkerLost            UNAVAILABLE         503  a worker ended in the middle of a request
│   └── RouterUnreachable     UNAVAILABLE         503  no router answers at the address
├── DeadlineExceeded          DEADLINE_EXCEEDED   504  the time limit passed
├── BlocksMissing             ABORTED             503  the store no longer holds blocks a ticket names
├── Superseded                ABORTED             409  a newer attempt of the same request runs
├── Cancelled                 CANCELLED           499  the caller left
├── ModelError                FAILED_PRECONDITION 500  a model's files are damaged, incomplete or contradictory
│   └── UnsupportedModel      FAILED_PRECONDITION 500  sound files that need something this engine does not have
├── BackendUnavailable        FAILED_PRECONDITION 500  a device or its kernels cannot be used here
└── Internal                  INTERNAL            500  a defect; the text never holds a prompt
"""

from __future__ import annotations

from typing import ClassVar

import grpc

DOMAIN = "twostroke"


class TwostrokeError(Exception):
    """Base of every error that may leave a service.

    Args:
        message: one sentence for the caller, without prompt text.
        field: the request field at fault, in the caller's own naming.
        retry_after: seconds after which a retry has a chance, when that is known.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http: ClassVar[int] = 500
    reason: ClassVar[str] = "INTERNAL"
    cure: ClassVar[str] = "report this as a defect"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after


class InvalidRequest(TwostrokeError):
    """The request can never succeed as it is."""

    code, http, reason = grpc.StatusCode.INVALID_ARGUMENT, 400, "INVALID_REQUEST"
    cure = "change what the message names"


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and `max_tokens`, do not fit the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"
    cure = "shorten the prompt, or send truncation: auto; lower max_tokens where only that is too much"


class TooLarge(InvalidRequest):
    """A body or message is larger than its limit."""

    code, http, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, 413, "TOO_LARGE"
    cure = "send less at once"


class Unauthenticated(TwostrokeError):
    """No API key was sent, or one that is not known; the text never holds it."""

    code, http, reason = grpc.StatusCode.UNAUTHENTICATED, 401, "INVALID_API_KEY"  # the word of the OpenAI API
    cure = "send a key of this cluster: Authorization: Bearer KEY, or TWOSTROKE_API_KEY for the command"


class PermissionDenied(TwostrokeError):
    """The API key does not allow what `field` asks for."""

    code, http, reason = grpc.StatusCode.PERMISSION_DENIED, 403, "PERMISSION_DENIED"
    cure = "leave the named field out, or use a key that allows it"


class NotFound(TwostrokeError):
    """The named thing does not exist."""

    code, http, reason = grpc.StatusCode.NOT_FOUND, 404, "NOT_FOUND"
    cure = "ask for something that exists"


class FormatMismatch(TwostrokeError):
    """Two parties hold different KvFormats; `field` names the first difference."""

    code, http, reason = grpc.StatusCode.FAILED_PRECONDITION, 409, "KV_FORMAT_MISMATCH"
    cure = "start both with the same model, weight mode and block size"


class Overloaded(TwostrokeError):
    """A bound on requests, tokens, slots or pages was reached."""

    code, http, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "OVERLOADED"
    cure = "retry after the given time"
    retryable = True


class Unavailable(TwostrokeError):
    """The service cannot take the request now."""

    code, http, reason = grpc.StatusCode.UNAVAILABLE, 503, "UNAVAILABLE"
    cure = "retry, or ask another replica"
    retryable = True


class WorkerLost(Unavailable):
    """The worker that held this request ended."""

    reason = "WORKER_LOST"


class RouterUnreachable(Unavailable):
    """No router answers at the address."""

    reason = "ROUTER_UNREACHABLE"
    cure = "start a cluster with `make up`, or give the host:port of its gRPC door"


class DeadlineExceeded(TwostrokeError):
    """The request's time limit passed."""

    code, http, reason = grpc.StatusCode.DEADLINE_EXCEEDED, 504, "DEADLINE_EXCEEDED"
    cure = "allow more time or ask for fewer tokens"


class BlocksMissing(TwostrokeError):
    """The store no longer holds blocks that this request needs."""

    code, http, reason = grpc.StatusCode.ABORTED, 503, "KV_BLOCKS_MISSING"
    cure = "prefill the prompt again"  # one level up; repeating the same call cannot help
    retryable = True


class Superseded(TwostrokeError):
    """A newer attempt of the same request has taken this one's place."""

    code, http, reason = grpc.StatusCode.ABORTED, 409, "ATTEMPT_SUPERSEDED"
    cure = "follow the newer attempt"


class Cancelled(TwostrokeError):
    """The caller left before the end."""

    code, http, reason = grpc.StatusCode.CANCELLED, 499, "CANCELLED"
    cure = "nothing to do"


class ModelError(TwostrokeError):
    """A model cannot be loaded: its files are damaged, incomplete or contradict each other."""

    code, http, reason = grpc.StatusCode.FAILED_PRECONDITION, 500, "MODEL_INVALID"
    cure = "fetch the named file again, or choose another model"


class UnsupportedModel(ModelError):
    """The files are sound, but need an architecture, tensor type or setting that this engine does not have."""

    reason = "MODEL_UNSUPPORTED"
    cure = "choose a model of a supported architecture and tensor type"


class BackendUnavailable(TwostrokeError):
    """A device was asked for that is not here, or whose kernels cannot be used; the message says why."""

    code, http, reason = grpc.StatusCode.FAILED_PRECONDITION, 500, "BACKEND_UNAVAILABLE"
    cure = "mend what the message names, or compute on the CPU with --device cpu"


class Internal(TwostrokeError):
    """A defect on our side."""


def by_reason() -> dict[str, type[TwostrokeError]]:
    """Every error class by its wire reason, so that a client raises what the server raised."""

    def walk(kind: type[TwostrokeError]) -> dict[str, type[TwostrokeError]]:
        found = {} if kind is TwostrokeError else {kind.reason: kind}
        for child in kind.__subclasses__():
            found |= walk(child)
        return found

    return walk(TwostrokeError)
