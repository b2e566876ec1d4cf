"""Settings that prefill and decode workers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from twostroke.engine.device import Device
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.engine.settings import EngineSettings
from twostroke.kv.blocks import TransportChoice
from twostroke.kv.format import KvFormat
from twostroke.rpc.server import ServerSettings
from twostroke.settings import InvalidSetting, parse_bytes, setting
from twostroke.telemetry import TelemetrySettings

OFF = "off"
MAX_THREADS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Runs one engine over one model."""

    model: Path = setting(help="a GGUF file, or a folder with config.json and *.safetensors")
    name: str = setting("", help="id under which the model is served; by default that of the file or folder")
    kvstore: str = setting(help="host:port of this host's KV block store")
    weights: WeightMode | None = setting(
        None,
        help="values of the matrices, by default f16 on a CPU, bf16 on a GPU; workers in different modes share nothing",
    )
    weights_cache: str = setting(
        "", help="folder to keep prepared weights in, or off; by default TWOSTROKE_CACHE or ~/.cache/twostroke"
    )
    weights_cache_bytes: str = setting("20GiB", help="most that all prepared weights may take; the oldest go first")
    device: Device = setting(Device.AUTO, help="where to compute: auto, cpu or cuda; auto takes a GPU that works")
    block_tokens: int = setting(16, help="tokens per block; every worker and store must agree")
    kv_dtype: KvMode = setting(
        KvMode.AUTO,
        help="numbers of keys and values: f32, f16 or bf16; auto is f32 beside weights in f32, else 16 bits",
    )
    kv_bytes: str = setting("1GiB", help="memory for pages of keys and values")
    tokens_per_step: int = setting(
        512, help="tokens of one forward pass; running streams first, prompts share the rest"
    )
    max_chunk: int | None = setting(None, help="most tokens of one prompt in one forward pass; unset is no limit")
    max_running: int = setting(64, help="sequences that are computed at once")
    max_waiting: int = setting(256, help="sequences that may wait; more are refused")
    threads: int | None = setting(
        None, help="threads of one pass; by default as many as there are processors, while they are idle"
    )
    graphs: bool = setting(
        True, help="capture decode steps on a GPU and replay them; --no-graphs launches every kernel"
    )
    transport: TransportChoice = setting(TransportChoice.AUTO, help="how block bytes move: auto, shm or grpc")
    lease_seconds: float = setting(30.0, help="how long blocks stay leased without a renewal")
    server: ServerSettings = field(default_factory=ServerSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= 256:
            raise InvalidSetting("block_tokens", self.block_tokens, "must lie between 1 and 256")
        if not 1 <= self.lease_seconds <= 600:
            raise InvalidSetting("lease_seconds", self.lease_seconds, "must lie between 1 and 600")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise InvalidSetting("threads", self.threads, f"must lie between 1 and {MAX_THREADS}")
        parse_bytes("kv_bytes", self.kv_bytes)
        parse_bytes("weights_cache_bytes", self.weights_cache_bytes)
        self.engine(pages=2)

    @property
    def served_name(self) -> str:
        """The id to ask for."""
        return self.name or (self.model.name if self.model.is_dir() else self.model.stem)

    def engine(self, *, pages: int) -> EngineSettings:
        """The engine's share of these settings."""
        try:
            return EngineSettings(
                pages=pages,
                tokens_per_step=self.tokens_per_step,
                max_running=self.max_running,
                max_waiting=self.max_waiting,
                max_chunk=self.max_chunk,
                graphs=self.graphs,
            )
        except ValueError as error:
            raise InvalidSetting("engine", "", str(error)) from error

    def pages(self, kv_format: KvFormat) -> int:
        """Pages that fit into `kv_bytes`, the scratch page beside them."""
        fit = parse_bytes("kv_bytes", self.kv_bytes) // kv_format.block_bytes
        if fit < 1:
            raise InvalidSetting("kv_bytes", self.kv_bytes, f"one page takes {kv_format.block_bytes} bytes")
        return fit + 1
