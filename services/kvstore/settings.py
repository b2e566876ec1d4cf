"""What an operator may tell a KV store node."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from services.kvstore.directory.settings import DirectorySettings
from twostroke.kv.tiers.disk import DiskLimits
from twostroke.rpc.server import ServerSettings
from twostroke.settings import InvalidSetting, setting
from twostroke.telemetry import TelemetrySettings

MIN_ARENA_BYTES = 1 << 16
MAX_AWAIT_SECONDS = 60.0
MAX_PEER_SECONDS = 2.0  # a worker gives up a node that is silent for longer than this and a disk may take


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The arena, and bounds on what callers may hold of it."""

    arena_bytes: int = setting(1 << 30, help="size of the arena, reserved at start")
    arena_directory: Path | None = setting(
        None,
        help="folder of the arena, shared with the workers; /dev/shm by default, a temporary one where it is missing",
    )
    checksums: bool = setting(False, help="check every block read through the arena, not only its name and generation")
    max_keys: int = setting(4_096, help="keys in one call")
    max_leases: int = setting(4_096, help="leases open at once")
    max_lease_blocks: int = setting(65_536, help="blocks under one lease")
    max_lease_seconds: float = setting(60.0, help="how long a lease lives without renewal, at most")
    reservation_seconds: float = setting(30.0, help="how long a writer may take for one copy before it is suspected")
    namespace_share: float = setting(1.0, help="most of the arena that one namespace may hold: over 0 to 1")
    keep_share: float = setting(0.25, help="most of a namespace's share that may be kept on advice: 0 to 1")
    max_keep_seconds: float = setting(600.0, help="how long an advice to keep blocks holds, at most")
    max_await_seconds: float = setting(60.0, help="how long a call may wait for blocks to be committed; at most 60")
    max_waiting_calls: int = setting(256, help="calls that wait for blocks at once")

    def __post_init__(self) -> None:
        if self.arena_bytes < MIN_ARENA_BYTES:
            raise InvalidSetting("arena_bytes", self.arena_bytes, f"must be at least {MIN_ARENA_BYTES}")
        for name in ("max_keys", "max_leases", "max_lease_blocks", "max_waiting_calls"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, getattr(self, name), "must be at least 1")
        for name in ("max_lease_seconds", "reservation_seconds", "max_keep_seconds", "max_await_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(name, getattr(self, name), "must be over 0")
        if self.max_await_seconds > MAX_AWAIT_SECONDS:
            raise InvalidSetting("max_await_seconds", self.max_await_seconds, f"must be at most {MAX_AWAIT_SECONDS}")
        if not 0 < self.namespace_share <= 1:
            raise InvalidSetting("namespace_share", self.namespace_share, "must be over 0 and at most 1")
        if not 0 <= self.keep_share <= 1:
            raise InvalidSetting("keep_share", self.keep_share, "must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """The disk tier: where blocks go that the arena has no room for, to be found again after a restart."""

    disk_directory: Path | None = setting(
        None, help="folder for blocks on a local disk, made if it is missing; without one the arena stands alone"
    )
    disk_bytes: int = setting(8 << 30, help="room on disk for the blocks of one format, reserved at once")
    disk_total_bytes: int | None = setting(
        None,
        help="room on disk for all formats; the least recently used others are removed at start; twice disk_bytes "
        "by default, so that blocks of the model before this one stay for a return",
    )
    disk_queue: int = setting(1_024, help="committed blocks that wait to be copied to disk; more are not copied")
    disk_retry_seconds: float = setting(30.0, help="after a failure of the disk, before it is tried again")
    disk_read_seconds: float = setting(0.5, help="how long a caller waits for blocks from disk; later ones are misses")

    def __post_init__(self) -> None:
        for name in ("disk_bytes", "disk_queue"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, getattr(self, name), "must be at least 1")
        if self.disk_total_bytes is not None and self.disk_total_bytes < self.disk_bytes:
            raise InvalidSetting("disk_total_bytes", self.disk_total_bytes, "must be at least disk_bytes")
        if self.disk_retry_seconds <= 0:
            raise InvalidSetting("disk_retry_seconds", self.disk_retry_seconds, "must be over 0")
        if not 0 < self.disk_read_seconds <= 1:
            raise InvalidSetting("disk_read_seconds", self.disk_read_seconds, "must be over 0 and at most 1")

    @property
    def limits(self) -> DiskLimits:
        """As the tier takes them."""
        return DiskLimits(
            bytes=self.disk_bytes,
            total_bytes=self.disk_total_bytes or 2 * self.disk_bytes,
            retry_seconds=self.disk_retry_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where other hosts find this node, and the door through which their nodes read blocks."""

    advertise: str = setting(
        "", help="host:port where other hosts reach this node; by default that of --listen, under this host's name"
    )
    data_listen: str = setting("127.0.0.1:0", help="host:port where other hosts' nodes read blocks; port 0 picks one")
    data_advertise: str = setting("", help="host:port that other nodes are told, where it is not that of --data-listen")
    data_connections: int = setting(32, help="connections of other nodes that may be open at once")
    data_idle_seconds: float = setting(60.0, help="how long a connection of another node may be silent")
    data_send_seconds: float = setting(5.0, help="how long another node may take to read a block")

    def __post_init__(self) -> None:
        for name in ("advertise", "data_listen", "data_advertise"):
            host, _, port = getattr(self, name).rpartition(":")
            if getattr(self, name) and not (host and port.isdigit() and int(port) <= 65_535):
                raise InvalidSetting(name, getattr(self, name), "must be host:port")
        if self.data_connections < 1:
            raise InvalidSetting("data_connections", self.data_connections, "must be at least 1")
        for name in ("data_idle_seconds", "data_send_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(name, getattr(self, name), "must be over 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """What reading from other hosts' nodes may cost this one."""

    peer_seconds: float = setting(
        2.0, help="how long a caller waits for blocks of other hosts' nodes, at most 2; later ones are misses"
    )
    peer_fetches: int = setting(16, help="reads from other nodes at once; a caller beyond that goes without")
    peer_connections: int = setting(4, help="connections over which blocks come from one node at once")
    peer_nodes: int = setting(64, help="other nodes that this one stays connected to")

    def __post_init__(self) -> None:
        if not 0 < self.peer_seconds <= MAX_PEER_SECONDS:
            raise InvalidSetting("peer_seconds", self.peer_seconds, f"must be over 0 and at most {MAX_PEER_SECONDS:g}")
        for name in ("peer_fetches", "peer_connections", "peer_nodes"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, getattr(self, name), "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreSettings:
    """A KV store node: holds blocks of attention keys and values for the workers of one host."""

    server: ServerSettings = dataclasses.field(default_factory=ServerSettings)
    telemetry: TelemetrySettings = dataclasses.field(default_factory=TelemetrySettings)
    store: StoreSettings = dataclasses.field(default_factory=StoreSettings)
    disk: DiskSettings = dataclasses.field(default_factory=DiskSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    peers: PeerSettings = dataclasses.field(default_factory=PeerSettings)
    directory: DirectorySettings = dataclasses.field(default_factory=DirectorySettings)
