"""Which blocks an arena keeps: hit ratios of eviction policies over the same prompts, in the pure model.

    python -m bench.eviction [--trace prompts.jsonl.gz] [--slots 3000 10000 30000]

Without a trace it makes three: conversations, a working set amid scans, and both. A trace has a JSON object a line,
whose `hash_ids` name a prompt's blocks in order (the format of the Mooncake traces). A hit is a block that is held and
whose predecessors are all held, since only a prefix is of use.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from twostroke.kv.eviction import EvictionQueue

Prompt = Sequence[bytes]


class Policy(Protocol):
    """What a cache asks; see `EvictionQueue`."""

    def add(self, key: bytes) -> object:
        """Queue a new block."""

    def pin(self, key: bytes) -> None:
        """Take a block out of its queue."""

    def unpin(self, key: bytes) -> None:
        """Queue a block again."""

    def use(self, key: bytes) -> None:
        """Note that a lease took a block that was there."""

    def evict(self) -> bytes | None:
        """Give up the next block."""


class LeastRecentlyUsed:
    """The yardstick."""

    def __init__(self) -> None:
        self._queue: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        """Queue a new block."""
        self._queue[key] = None

    def pin(self, key: bytes) -> None:
        """Take a block out of its queue."""
        del self._queue[key]

    unpin = add

    def use(self, key: bytes) -> None:
        """Nothing is remembered."""

    def evict(self) -> bytes | None:
        """Give up the block whose last use is longest ago."""
        return self._queue.popitem(last=False)[0] if self._queue else None


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023) with a small queue of a tenth; leased blocks come back to the end of theirs.

    The paper moves a block to the main queue after two uses; a use here is another request, and one is enough: with two
    the ratios below are lower.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._home: dict[bytes, OrderedDict[bytes, None]] = {}
        self._uses: dict[bytes, int] = {}

    def add(self, key: bytes) -> None:
        """Queue a new block: in the main queue when the ghost remembers it."""
        back = key in self._ghost
        self._ghost.pop(key, None)
        self._home[key], self._uses[key] = self._main if back else self._small, 0
        self.unpin(key)

    def pin(self, key: bytes) -> None:
        """Take a block out of its queue."""
        del self._home[key][key]

    def unpin(self, key: bytes) -> None:
        """Queue a block again."""
        self._home[key][key] = None

    def use(self, key: bytes) -> None:
        """Count a use, up to three."""
        self._uses[key] = min(self._uses[key] + 1, 3)

    def evict(self) -> bytes | None:
        """Give up the first block that was not used again."""
        while self._small or self._main:
            small = 10 * len(self._small) >= len(self._small) + len(self._main)
            key, _ = (self._small if small else self._main).popitem(last=False)
            if not self._uses[key]:
                del self._home[key], self._uses[key]
                if small:
                    self._ghost[key] = None
                while len(self._ghost) > len(self._home):
                    self._ghost.popitem(last=False)
                return key
            self._uses[key] -= not small
            self._home[key] = self._main
            self._main[key] = None
        return None


POLICIES: dict[str, Callable[[], Policy]] = {"LRU": LeastRecentlyUsed, "S3-FIFO": S3Fifo, "ours": EvictionQueue}


class Cache:
    """Blocks of prompts in so many slots, each prompt under a lease of its own."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self._policy = policy
        self._slots = slots
        self._held: set[bytes] = set()

    def serve(self, prompt: Prompt) -> int:
        """Use what is held of a prompt and hold the rest; answers how many leading blocks were there."""
        hits = next((index for index, key in enumerate(prompt) if key not in self._held), len(prompt))
        found = self._held.intersection(prompt)
        for key in found:
            self._policy.pin(key)
            self._policy.use(key)
        for key in prompt:
            if key not in found and not self._hold(key):
                break
        for key in reversed(prompt):
            if key in self._held:
                self._policy.unpin(key)
        return hits

    def serve_all(self, prompts: Iterable[Prompt]) -> int:
        """Serve prompts one after the other; answers the sum of their hits."""
        return sum(map(self.serve, prompts))

    def _hold(self, key: bytes) -> bool:
        if len(self._held) == self._slots:
            victim = self._policy.evict()
            if victim is None:
                return False
            self._held.remove(victim)
        self._held.add(key)
        self._policy.add(key)
        self._policy.pin(key)
        return True


def prompt_of(name: str, blocks: int) -> Prompt:
    """A prompt that shares no block with one of another name; a longer one of the same name begins like it."""
    return [f"{name}/{index}".encode() for index in range(blocks)]


def made(conversations: int, scans: float, count: int, *, working: int = 0, seed: int = 1) -> Iterator[Prompt]:
    """Prompts of `conversations` that go on at a time, or of a working set, amid a share of prompts asked only once.

    A conversation has up to 8 turns; the first has 10 blocks, each further one 3 more. All others have 20.
    """
    chance, turns, begun = random.Random(seed), dict[int, tuple[int, int]](), 0
    for index in range(count):
        if chance.random() < scans:
            yield prompt_of(f"once {index}", 20)
        elif working:
            yield prompt_of(f"working {chance.randrange(working)}", 20)
        else:
            if len(turns) < conversations:
                name, begun = begun, begun + 1
                turns[name] = 0, chance.randint(1, 8)
            else:
                name = chance.choice(list(turns))
            turn, last = turns[name]
            yield prompt_of(f"conversation {name}", 10 + 3 * turn)
            turns[name] = turn + 1, last
            if turn + 1 == last:
                del turns[name]


def read(path: Path) -> Iterator[Prompt]:
    """The prompts of a trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield [str(name).encode() for name in json.loads(line)["hash_ids"]]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--slots", type=int, nargs="+", default=[500])
    told = parser.parse_args()
    traces = {
        "20 conversations": list(made(20, 0.0, 4_000)),
        "400 blocks in use, 80% scans": list(made(0, 0.8, 6_000, working=20)),
        "15 conversations, 50% scans": list(made(15, 0.5, 4_000)),
    }
    if told.trace:
        traces = {told.trace.name: list(read(told.trace))}
    print(f"{'hit ratio':<40}{'slots':>8}", *(f"{name:>9}" for name in POLICIES))
    for name, prompts in traces.items():
        blocks = sum(map(len, prompts))
        for slots in told.slots:
            ratios = [Cache(policy(), slots).serve_all(prompts) / blocks for policy in POLICIES.values()]
            print(f"{name:<40}{slots:>8}", *(f"{ratio:>9.3f}" for ratio in ratios))


if __name__ == "__main__":
    main()
