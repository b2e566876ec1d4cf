"""What a user may tell `twostroke up`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from twostroke.engine.device import Device
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.settings import InvalidSetting, parse_bytes, setting

MAX_WORKERS = 16  # of a role, on one machine
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Starts a whole cluster on this machine: a KV block store, prefill and decode workers, and the router."""

    model: str = setting("", help="a GGUF file, or a Hugging Face folder or id; by default the packaged SmolLM2")
    name: str = setting("", help="id under which the model is served; by default its file, folder or hub id")
    prefill: int = setting(1, help="prefill workers")
    decode: int = setting(1, help="decode workers")
    host: str = setting("127.0.0.1", help="interface of the two doors; everything else stays on loopback")
    port: int = setting(8_000, help="port of the OpenAI API; 0 picks a free one")
    grpc_port: int | None = setting(None, help="port of the gRPC door; by default the one after --port")
    api_keys: Path | None = setting(None, help="file of API keys (twostroke keys); without one, none is asked for")
    device: Device = setting(Device.AUTO, help="where workers compute: auto, cpu or cuda; auto takes a GPU that works")
    weights: WeightMode | None = setting(
        None,
        help="values of the matrices: f32 as the file has them; f16, bf16, int8 rounded once; by default the device's",
    )
    weights_cache: str = setting(
        "", help="folder to keep prepared weights in, or off; by default TWOSTROKE_CACHE or ~/.cache/twostroke"
    )
    threads: int | None = setting(None, help="threads of one pass of each worker; by default those that are idle")
    kv_dtype: KvMode = setting(
        KvMode.AUTO,
        help="numbers of keys and values: f32, f16 or bf16; auto is f32 beside weights in f32, else 16 bits",
    )
    kv_bytes: str = setting("512MiB", help="memory of each worker for pages of keys and values")
    arena_bytes: str = setting("1GiB", help="shared memory for stored blocks")
    arena_directory: Path | None = setting(
        None, help="folder of the arena; by default /dev/shm, or a temporary one where that is missing"
    )
    disk_directory: Path | None = setting(
        None, help="folder for stored blocks on disk, which survive a restart; without one memory is all there is"
    )
    disk_bytes: str = setting("8GiB", help="room on disk for stored blocks, reserved at once")
    drain_seconds: float = setting(20.0, help="how long open answers may go on after Ctrl-C")
    otlp_endpoint: str = setting("", help="OTLP gRPC endpoint for traces, such as http://127.0.0.1:4317; empty is off")
    log_level: str = setting("info", help="debug, info, warning or error")
    fault_points: bool = setting(
        False, help="let everything but the router be struck on purpose, to test the cluster; never in production"
    )
    state_directory: Path | None = setting(None, help="folder for logs; by default ~/.local/state/twostroke")
    check: bool = setting(False, help="check everything, print the commands, and start nothing")

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            self._within(name, 1, MAX_WORKERS)
        self._within("port", 0, MAX_PORT - 1)
        if self.grpc_port is not None:
            self._within("grpc_port", 0, MAX_PORT)
            if self.grpc_port == self.port != 0:
                raise InvalidSetting("grpc_port", self.grpc_port, "is the port of the OpenAI API; choose another")
        if self.threads is not None:
            self._within("threads", 1, os.cpu_count() or 1)
        if not 0 <= self.drain_seconds <= 3_600:
            raise InvalidSetting("drain_seconds", self.drain_seconds, "must lie between 0 and 3600")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidSetting("log_level", self.log_level, "must be debug, info, warning or error")
        parse_bytes("kv_bytes", self.kv_bytes)
        parse_bytes("arena_bytes", self.arena_bytes)
        parse_bytes("disk_bytes", self.disk_bytes)

    def _within(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise InvalidSetting(name, value, f"must lie between {low} and {high}")

    @property
    def arena_size(self) -> int:
        """Bytes of shared memory for stored blocks."""
        return parse_bytes("arena_bytes", self.arena_bytes)
