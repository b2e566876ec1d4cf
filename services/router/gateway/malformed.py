"""What the HTTP library reports of connections: malformed HTTP is a line now and then, a defect is told whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

QUIET_SECONDS = 60.0  # between two lines: whoever sends garbage can send much of it


class ConnectionLog(logging.LoggerAdapter[logging.Logger]):
    """The logger of a server; what it says of malformed HTTP never holds what was sent, which may be a key.

    Args:
        logger: where all goes.
        clock: seconds that never run backwards.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logger)
        self._clock = clock
        self._quiet_until = clock()
        self._untold = 0

    def log(self, level: int, msg: object, *args: object, **named: Any) -> None:
        """Log as told, but for errors that are the caller's."""
        error = named.get("exc_info")
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            super().log(level, msg, *args, **named)
        elif self._clock() < self._quiet_until:
            self._untold += 1
        else:
            self.logger.info("malformed HTTP", extra={"kind": type(error).__name__, "more_since_last": self._untold})
            self._quiet_until, self._untold = self._clock() + QUIET_SECONDS, 0
