"""The plan of a cluster: which processes, told what. Pure, so that a compose file can be held to the same words."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from twostroke.engine.device import Device
from twostroke.engine.mode import KvMode
from twostroke.launcher.options import UpOptions
from twostroke.settings import parse_bytes


class Role(enum.Enum):
    """What a process is for; the value is its module."""

    KVSTORE = "services.kvstore"
    PREFILL = "services.prefill"
    DECODE = "services.decode"
    ROUTER = "services.router"

    @property
    def is_worker(self) -> bool:
        """Whether it holds a model."""
        return self in (Role.PREFILL, Role.DECODE)


def join_address(host: str, port: int) -> str:
    """host:port, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process listens, and what others call to reach it: two host:port, the same on one machine."""

    listen: str
    reach: str

    @classmethod
    def local(cls, port: int, host: str = "127.0.0.1") -> Place:
        """A place on this machine."""
        address = join_address(host, port)
        return cls(address, address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where everything of one cluster lies."""

    model: Path
    name: str  # to serve it under; empty: that of the file or folder
    arena_directory: Path
    kvstore: Place
    prefill: tuple[Place, ...]
    decode: tuple[Place, ...]
    router: Place
    http_listen: str
    api_keys: Path | None = None  # file of the keys that both doors ask for

    @property
    def model_name(self) -> str:
        """What the model is called, to people and in requests."""
        return self.name or self.model.name.removesuffix(".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process: `python -m MODULE ARGUMENTS`."""

    name: str
    role: Role
    arguments: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """What follows the interpreter on the command line."""
        return ("-m", self.role.value, *self.arguments)


def plan(options: UpOptions, site: Site) -> tuple[ChildSpec, ...]:
    """Every process of the cluster, in the order in which they start."""
    workers = [
        ChildSpec(name=f"{role.name.lower()}-{number}", role=role, arguments=_worker(options, site, place))
        for role, places in ((Role.PREFILL, site.prefill), (Role.DECODE, site.decode))
        for number, place in enumerate(places, start=1)
    ]
    return (
        ChildSpec(name="kvstore", role=Role.KVSTORE, arguments=_kvstore(options, site)),
        *workers,
        ChildSpec(name="router", role=Role.ROUTER, arguments=_router(options, site)),
    )


def _kvstore(options: UpOptions, site: Site) -> tuple[str, ...]:
    return (
        *("--listen", site.kvstore.listen),
        *("--advertise", site.kvstore.reach),
        *("--arena-directory", str(site.arena_directory)),
        *("--arena-bytes", str(options.arena_size)),
        *_disk(options),
        *_shared(options),
    )


def _disk(options: UpOptions) -> tuple[str, ...]:
    if options.disk_directory is None:
        return ()
    size = parse_bytes("disk_bytes", options.disk_bytes)
    return ("--disk-directory", str(options.disk_directory.absolute()), "--disk-bytes", str(size))


def _worker(options: UpOptions, site: Site, place: Place) -> tuple[str, ...]:
    return (
        *("--listen", place.listen),
        *("--model", str(site.model)),
        *(("--name", site.name) if site.name else ()),
        *("--kvstore", site.kvstore.reach),
        *(() if options.device is Device.AUTO else ("--device", options.device)),
        *(("--weights", options.weights) if options.weights else ()),
        *(("--weights-cache", options.weights_cache) if options.weights_cache else ()),
        *(("--threads", str(options.threads)) if options.threads else ()),
        *(() if options.kv_dtype is KvMode.AUTO else ("--kv-dtype", options.kv_dtype)),
        *("--kv-bytes", options.kv_bytes),
        *_shared(options),
    )


def _router(options: UpOptions, site: Site) -> tuple[str, ...]:
    return (
        *("--listen", site.router.listen),
        *("--http-listen", site.http_listen),
        *("--prefill", ",".join(place.reach for place in site.prefill)),
        *("--decode", ",".join(place.reach for place in site.decode)),
        *(("--api-keys", str(site.api_keys)) if site.api_keys else ()),
        *_shared(options),
    )


def _shared(options: UpOptions) -> tuple[str, ...]:
    tracing = ("--otlp-endpoint", options.otlp_endpoint) if options.otlp_endpoint else ()
    return ("--drain-seconds", f"{options.drain_seconds:g}", "--log-level", options.log_level, *tracing)
