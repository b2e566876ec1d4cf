"""What can be told to the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.router.gateway.settings import GatewaySettings
from twostroke.rpc.server import ServerSettings
from twostroke.settings import InvalidSetting, setting
from twostroke.telemetry import TelemetrySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Bounds of a request's path."""

    worker_wait_seconds: float = setting(30.0, help="how long a request waits for a worker to come (back)")
    worker_silence_seconds: float = setting(
        10.0, help="without a report for so long a worker counts as lost; it reports four times a second"
    )
    request_seconds: float = setting(600.0, help="time limit of a gRPC request that has no deadline")
    index_keys: int = setting(100_000, help="block keys whose place is remembered, at 200 bytes each")
    advice_calls: int = setting(16, help="calls that one namespace may have open to keep, release or prefetch prompts")
    usage_log: Path | None = setting(None, help="file to which one JSON line a request is appended; unset logs it")

    def __post_init__(self) -> None:
        for name in ("worker_wait_seconds", "worker_silence_seconds", "request_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                raise InvalidSetting(name, getattr(self, name), "must be over 0 and at most 86400")
        for name in ("index_keys", "advice_calls"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, getattr(self, name), "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The door of a cluster: OpenAI HTTP and gRPC in, prefill and decode workers behind."""

    prefill: tuple[str, ...] = setting(help="host:port of each prefill worker, comma-separated")
    decode: tuple[str, ...] = setting(help="host:port of each decode worker, comma-separated")
    api_keys: Path | None = setting(None, help="file of API keys; without one every caller is the tenant `default`")
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            addresses: tuple[str, ...] = getattr(self, name)
            if not addresses or any(not address.rpartition(":")[2].isdigit() for address in addresses):
                raise InvalidSetting(name, ",".join(addresses), "must be one or more host:port")
