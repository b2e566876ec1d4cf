"""Workers compute below the router, which must answer meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

WORKER_NICENESS = 5  # more than the launcher's
_TRIES, _PAUSE = 100, 0.11


async def lower(pid: int) -> None:
    """Let the processor prefer others to process `pid`, which was started in a session of its own.

    Linux may share processors between sessions first, and then looks at the niceness of the session alone. It changes
    one of these in a tenth of a second, so this may take a while where many are started.
    """
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + WORKER_NICENESS)
    with contextlib.suppress(OSError):  # dead already, which who waits for it will say
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    for _ in range(_TRIES):
        if _lower_session(pid, niceness):
            return
        await asyncio.sleep(_PAUSE)


def _lower_session(pid: int, niceness: int) -> bool:
    """Return whether that is settled: done, or not to be had here."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # another session's turn
    return True
