"""What an operator may tell a KV store node."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from twostroke.rpc.server import ServerSettings
from twostroke.settings import InvalidSetting, setting
from twostroke.telemetry import TelemetrySettings

MIN_ARENA_BYTES = 1 << 16


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

    def __post_init__(self) -> None:
        if self.arena_bytes < MIN_ARENA_BYTES:
            raise InvalidSetting("arena_bytes", self.arena_bytes, f"must be at least {MIN_ARENA_BYTES}")
        for name in ("max_keys", "max_leases", "max_lease_blocks"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, getattr(self, name), "must be at least 1")
        for name in ("max_lease_seconds", "reservation_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(name, getattr(self, name), "must be over 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The door through which other hosts' nodes read blocks."""

    data_listen: str = setting("127.0.0.1:0", help="host:port where other hosts' nodes read blocks; port 0 picks one")
    data_advertise: str = setting("", help="host:port that other nodes are told, where it is not that of --data-listen")
    data_connections: int = setting(32, help="connections of other nodes that may be open at once")
    data_idle_seconds: float = setting(60.0, help="how long a connection of another node may be silent")
    data_send_seconds: float = setting(5.0, help="how long another node may take to read a block")

    def __post_init__(self) -> None:
        for name in ("data_listen", "data_advertise"):
            host, _, port = getattr(self, name).rpartition(":")
            if getattr(self, name) and not (host and port.isdigit() and int(port) <= 65_535):
                raise InvalidSetting(name, getattr(self, name), "must be host:port")
        if self.data_connections < 1:
            raise InvalidSetting("data_connections", self.data_connections, "must be at least 1")
        for name in ("data_idle_seconds", "data_send_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(name, getattr(self, name), "must be over 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreSettings:
    """A KV store node: holds blocks of attention keys and values for the workers of one host."""

    server: ServerSettings = dataclasses.field(default_factory=ServerSettings)
    telemetry: TelemetrySettings = dataclasses.field(default_factory=TelemetrySettings)
    store: StoreSettings = dataclasses.field(default_factory=StoreSettings)
