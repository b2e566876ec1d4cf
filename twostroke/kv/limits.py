"""What a block store is told about its bounds, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds on what callers can multiply. Slots bound blocks, reservations and namespaces."""

    leases: int = 4_096
    lease_blocks: int = 65_536
    lease_seconds: float = 60.0
    reservation_seconds: float = 30.0
    namespace_share: float = 1.0  # of the slots, for one namespace
    keep_share: float = 0.25  # of what a namespace may hold, for blocks that are kept
    keep_seconds: float = 600.0
    waiting: int = 256  # calls that wait for blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """How full a store is, and what has happened. free + reserved + quarantined + committed = slots."""

    slots: int = 0
    free: int = 0
    reserved: int = 0
    quarantined: int = 0
    committed: int = 0
    leased_blocks: int = 0  # committed blocks under at least one lease
    leases: int = 0
    transient: int = 0  # of the committed blocks
    kept: int = 0  # of the committed blocks
    namespaces: int = 0  # that hold a slot
    waiting: int = 0  # calls that wait for blocks
    evictions: int = 0  # since the start, like all below
    ghost_hits: int = 0  # blocks that came back soon after their eviction
    quota_refusals: int = 0  # times that a namespace at its quota had nothing to give up
    honoured_keeps: int = 0  # uses of blocks that were kept
    expired_keeps: int = 0  # kept blocks whose time passed
