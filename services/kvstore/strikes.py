"""Faults on purpose on the disk: files whose every use is a point at which FaultService may strike.

Nothing here is loaded unless the node was told `--fault-points`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from twostroke.kv.tiers import folders
from twostroke.kv.tiers.files import OpenFile, TierFile
from twostroke.rpc.faultboard import FaultBoard
from twostroke.v1.faults_pb2 import MOMENT_ANSWERED, MOMENT_CALLED, Moment

DISK_OPERATIONS = tuple(
    f"disk.{file}.{what}" for file in (folders.BLOCKS, folders.HEADERS) for what in ("open", "read", "write")
)


class StruckFile(TierFile):
    """Belongs to one thread, which is not the one of the board's loop."""

    def __init__(self, path: Path, size: int, board: FaultBoard, loop: asyncio.AbstractEventLoop) -> None:
        self._name, self._board, self._loop = f"disk.{path.name}", board, loop
        self._reach("open", MOMENT_CALLED, memoryview(b""))
        super().__init__(path, size)

    def read(self, into: memoryview, offset: int) -> bool:
        """See TierFile."""
        self._reach("read", MOMENT_CALLED, into)
        whole = super().read(into, offset)
        self._reach("read", MOMENT_ANSWERED, into)
        return whole

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """See TierFile. What is corrupted on its way stays as it is where it came from."""
        copy = memoryview(bytearray(data))
        self._reach("write", MOMENT_CALLED, copy)
        super().write(copy, offset)
        self._reach("write", MOMENT_ANSWERED, copy)

    def _reach(self, what: str, moment: Moment.ValueType, handled: memoryview) -> None:
        self._board.reach_from_thread(self._loop, f"{self._name}.{what}", moment, handled)


def struck_files(board: FaultBoard) -> OpenFile:
    """Opens files at which the board strikes; for the running event loop."""
    loop = asyncio.get_running_loop()
    return lambda path, size: StruckFile(path, size, board, loop)
