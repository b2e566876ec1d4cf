"""How long to wait before a process is started again, and when to stop trying."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 10.0
SETTLED_SECONDS = 60.0  # whoever lived so long has recovered
MAX_QUICK_DEATHS = 5  # in a row
MAX_FAILED_STARTS = 2  # of one that never served: what keeps it from starting rarely goes away by itself


@dataclass(slots=True)
class Backoff:
    """Counts quick deaths in a row."""

    quick_deaths: int = 0

    def after(self, lived: float, *, failed_start: bool) -> float | None:
        """Seconds to wait after a death; None when it is time to give up.

        Args:
            lived: seconds from start to death.
            failed_start: the process ended by itself, and none of its kind has ever served.
        """
        self.quick_deaths = 1 if lived >= SETTLED_SECONDS else self.quick_deaths + 1
        if self.quick_deaths >= (MAX_FAILED_STARTS if failed_start else MAX_QUICK_DEATHS):
            return None
        return float(min(FIRST_SECONDS * 2 ** (self.quick_deaths - 1), LONGEST_SECONDS))
