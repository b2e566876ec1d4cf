"""The worker contract: identity and load, both ways."""

from __future__ import annotations

from twostroke.cluster import ModelInfo, Role, Status, WorkerInfo, WorkerLoad, WorkerStatus
from twostroke.errors import InvalidRequest
from twostroke.v1 import router_pb2, worker_pb2
from twostroke.wire import common

_ROLE = {worker_pb2.WORKER_ROLE_PREFILL: Role.PREFILL, worker_pb2.WORKER_ROLE_DECODE: Role.DECODE}
_ROLE_PB = {value: key for key, value in _ROLE.items()}


def model_info(message: worker_pb2.ModelInfo) -> ModelInfo:
    """Read a model."""
    return ModelInfo(
        id=message.id,
        architecture=message.architecture,
        context_tokens=message.context_tokens,
        vocab_size=message.vocab_size,
        end_token_ids=frozenset(message.end_token_ids),
        weight_mode=message.weight_mode,
        tokenizer_digest=message.tokenizer_digest,
        fingerprint=message.fingerprint,
    )


def model_info_pb(value: ModelInfo) -> worker_pb2.ModelInfo:
    """Write a model."""
    return worker_pb2.ModelInfo(
        id=value.id,
        architecture=value.architecture,
        context_tokens=value.context_tokens,
        vocab_size=value.vocab_size,
        end_token_ids=sorted(value.end_token_ids),
        weight_mode=value.weight_mode,
        tokenizer_digest=value.tokenizer_digest,
        fingerprint=value.fingerprint,
    )


def worker_info(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """Read a worker. Raises InvalidRequest for a role that we do not know, FormatMismatch for a false digest."""
    if message.role not in _ROLE:
        raise InvalidRequest(f"unknown worker role {message.role}", field="role")
    return WorkerInfo(
        incarnation=message.incarnation,
        role=_ROLE[message.role],
        model=model_info(message.model),
        kv_format=common.kv_format(message.kv_format),
        device=message.device,
        pages=message.pages,
        max_running=message.max_running,
        max_open=message.max_open,
    )


def worker_info_pb(value: WorkerInfo) -> worker_pb2.WorkerInfo:
    """Write a worker."""
    return worker_pb2.WorkerInfo(
        incarnation=value.incarnation,
        role=_ROLE_PB[value.role],
        model=model_info_pb(value.model),
        kv_format=common.kv_format_pb(value.kv_format),
        device=value.device,
        pages=value.pages,
        max_running=value.max_running,
        max_open=value.max_open,
    )


def load(message: worker_pb2.LoadReport) -> WorkerLoad:
    """Read a load."""
    return WorkerLoad(
        running=message.running,
        waiting=message.waiting,
        waiting_tokens=message.waiting_tokens,
        free_pages=message.free_pages,
        evictable_pages=message.evictable_pages,
        steps=message.steps,
        draining=message.draining,
        store=message.store_address,
    )


def load_pb(value: WorkerLoad) -> worker_pb2.LoadReport:
    """Write a load."""
    return worker_pb2.LoadReport(
        running=value.running,
        waiting=value.waiting,
        waiting_tokens=value.waiting_tokens,
        free_pages=value.free_pages,
        evictable_pages=value.evictable_pages,
        steps=value.steps,
        draining=value.draining,
        store_address=value.store,
    )


def status(message: router_pb2.GetStatusResponse) -> Status:
    """Read how a cluster is."""
    workers = tuple(
        WorkerStatus(
            address=each.address,
            info=worker_info(each.info) if each.HasField("info") else None,
            load=load(each.load),
            available=each.available,
        )
        for each in message.workers
    )
    return Status(ready=message.ready, reason=message.reason, workers=workers, open_requests=message.open_requests)
