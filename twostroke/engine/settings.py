"""What an operator may tell the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes and limits of one engine; checked on creation.

    Attributes:
        pages: KV pages to allocate, the scratch page included.
        tokens_per_step: budget of one forward pass; running sequences take a token each, prompts share the rest.
        max_running: sequences that hold pages at once.
        max_waiting: sequences that may wait beyond those; more are refused as Overloaded.
        max_chunk: most prompt tokens of one sequence in one step, so that others fit beside it; None for no such limit.
        graphs: whether decode steps are captured and replayed on a CUDA device.
    """

    pages: int
    tokens_per_step: int = 512
    max_running: int = 64
    max_waiting: int = 256
    max_chunk: int | None = None
    graphs: bool = True

    def __post_init__(self) -> None:
        minima = {"pages": 2, "tokens_per_step": 1, "max_running": 1, "max_waiting": 1, "max_chunk": 1}
        for name, least in minima.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.max_running > self.tokens_per_step:
            raise ValueError(
                f"max_running is {self.max_running} and tokens_per_step {self.tokens_per_step}: every running sequence"
                " needs a token of each step"
            )
