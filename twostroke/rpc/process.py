"""How a service process begins and ends: what it loads, its exit code, and one line that says why."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twostroke.errors import TwostrokeError
from twostroke.settings import InvalidSetting

log = logging.getLogger(__name__)


@contextmanager
def importing() -> Iterator[None]:
    """Import inside the block what a service runs on, after its settings: a wrong one is told at once.

    What is loaded here stays, and the garbage collector never looks at it: an import of torch is a sixth faster without
    collections, and later ones stop a worker for microseconds instead of 60 ms.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def exit_code(run: Callable[[], None]) -> int:
    """Run a service; 0 when it drained, 1 when it failed, 2 when it was told something wrong."""
    try:
        run()
    except KeyboardInterrupt:
        return 130
    except (InvalidSetting, TwostrokeError, BaseExceptionGroup) as raised:
        error = _first(raised)
        if isinstance(error, InvalidSetting):
            log.error("wrong setting", extra={"error": str(error)})
            return 2
        if isinstance(error, TwostrokeError):
            log.error("stopped", extra={"error": str(error), "cure": error.cure})
            return 1
        raise
    return 0


def _first(error: BaseException) -> BaseException:
    """The first cause inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
