"""kill -9, again and again; whoever was killed is started again at once, as its supervisor would."""

from __future__ import annotations

import random
from collections import Counter

from tests.support.processes import Processes, Service


class Kills:
    """Chooses victims. In the first half anybody but a router; in the second the others' memory is to be followed."""

    def __init__(self, whole: Processes, seed: int) -> None:
        self._dice = random.Random(seed)
        self._anybody = [whole.kvstore, *whole.prefill, *whole.decode]
        self._few = [whole.prefill[0], whole.decode[0]]
        self._striking = False
        self.struck: Counter[str] = Counter()
        self.born: dict[Service, int] = {}  # requests that had been drawn when its present life began

    async def strike(self, drawn: int, *, late: bool) -> None:
        """Kill one and start it again, unless another one is still on its way back."""
        if self._striking:
            return
        self._striking = True
        victim = self._dice.choice(self._few if late else self._anybody)
        try:
            await victim.kill()
            await victim.start()
        finally:
            self._striking = False
        self.struck[victim.name] += 1
        self.born[victim] = drawn
