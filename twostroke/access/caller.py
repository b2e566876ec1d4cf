"""Who asks, as the router established it."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.errors import PermissionDenied
from twostroke.types import Priority

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """On whose behalf a request runs and what it may ask for; never taken from the request itself.

    The default is everybody, where no keys are asked for.
    """

    tenant: str = DEFAULT
    namespace: str = DEFAULT  # sharing domain of cached blocks
    highest: Priority = Priority.INTERACTIVE  # the first class it may ask for

    def priority(self, asked: Priority | None) -> Priority:
        """The class of a request: what it asks for; unasked, standard, or the highest allowed where that is lower.

        Raises: PermissionDenied. A class that was asked for is never replaced in silence.
        """
        if asked is None:
            return max(Priority.STANDARD, self.highest)  # a lower number is served first
        if asked < self.highest:
            raise PermissionDenied(
                f"priority {asked.name.lower()} is not for this API key; {self.highest.name.lower()} is its highest",
                field="priority",
            )
        return asked
