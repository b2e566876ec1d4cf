"""Value types about workers and the model they serve."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from twostroke.kv.format import KvFormat


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model as its workers describe it."""

    id: str
    architecture: str
    context_tokens: int
    vocab_size: int
    end_token_ids: frozenset[int]
    weight_mode: str
    tokenizer_digest: bytes
    fingerprint: str  # names weights, mode and format; equal fingerprints give equal answers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as it describes itself."""

    incarnation: str  # new at every start
    role: Role
    model: ModelInfo
    kv_format: KvFormat
    device: str
    pages: int
    max_running: int
    max_open: int  # sequences that are computed, and those that may wait


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """How busy a worker is."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    steps: int = 0
    draining: bool = False
    store: str = ""  # address of its store node, as other hosts reach it; empty until it has found it


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as the router sees it; `info` is None while it cannot be reached."""

    address: str
    info: WorkerInfo | None
    load: WorkerLoad
    available: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A cluster as its router sees it."""

    ready: bool
    reason: str
    workers: tuple[WorkerStatus, ...]
    open_requests: int
