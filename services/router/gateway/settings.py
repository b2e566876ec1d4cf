"""What an operator may tell the HTTP door."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.settings import InvalidSetting, setting

MAX_REQUEST_SECONDS = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Address and bounds of the HTTP door."""

    http_listen: str = setting("127.0.0.1:8000", help="host:port of the OpenAI API; port 0 picks a free one")
    http_body_bytes: int = setting(10 << 20, help="largest request body")
    http_body_seconds: float = setting(30.0, help="how long a request body may take to arrive")
    http_request_seconds: float = setting(600.0, help="time limit of a request that sets no x-request-timeout")
    http_heartbeat_seconds: float = setting(10.0, help="silence after which a stream gets a comment line")
    http_stall_seconds: float = setting(60.0, help="how long a stream may wait for a client that does not read")

    def __post_init__(self) -> None:
        host, _, port = self.http_listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535:
            raise InvalidSetting("http_listen", self.http_listen, "must be host:port")
        if not 1 <= self.http_body_bytes <= 1 << 30:
            raise InvalidSetting("http_body_bytes", self.http_body_bytes, "must be from 1 to 2^30")
        for name in ("http_body_seconds", "http_request_seconds", "http_heartbeat_seconds", "http_stall_seconds"):
            value: float = getattr(self, name)
            if not 0 < value <= MAX_REQUEST_SECONDS:
                raise InvalidSetting(name, value, f"must be over 0 to {MAX_REQUEST_SECONDS:g}")

    @property
    def host(self) -> str:
        """The interface to listen on."""
        return self.http_listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port to listen on; 0 picks a free one."""
        return int(self.http_listen.rpartition(":")[2])
