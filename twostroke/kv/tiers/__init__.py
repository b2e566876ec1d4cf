"""Tiers below the arena: slower, larger, and of no consequence when they fail. Each is a `Tier`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """How full a tier is, and what went wrong since the process began."""

    on: bool  # False before it is open, while it is off because of a failure, and once it is closed
    slots: int
    blocks: int
    failures: int  # times it turned itself off
    damaged: int  # blocks that did not match their checksum when they were read


class Tier(Protocol):
    """What a node needs of a store below its arena. No call raises: a tier in trouble holds nothing and takes nothing.

    `holds` and `stats` answer from memory, in any thread. The others block, and belong to one thread at a time.
    """

    def open(self) -> None:
        """Begin: what an earlier process left is held from now on."""

    def holds(self, keys: Iterable[bytes]) -> int:
        """How many leading keys are held, most likely: only `read` proves a block whole."""

    def read(self, key: bytes, into: memoryview) -> int | None:
        """Fill `into`, uint8 [block_bytes], with a block; answers its tokens.

        None says that the block is not held, or no longer; `into` may hold anything then.
        """

    def write(self, key: bytes, tokens: int, data: memoryview, intact: Callable[[int], bool]) -> bool:
        """Take a block, uint8 [block_bytes], unless it is held already; answers whether it is held now.

        `intact` is asked once the bytes were copied, and given their xxh3-64: were they that block all along? When it
        says no, nothing is held. So the source may change meanwhile (a reader's half of a seqlock).
        """

    def close(self) -> None:
        """End; what is held stays for the next process."""

    def stats(self) -> TierStats:
        """Count."""
