"""Where the disk of a store node can be struck, how, and what that may cost."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.kit.stage import PROMPT_TOKENS
from tests.faults.kit.strikes import ANSWERED, CALLED, Blow
from twostroke.v1 import faults_pb2

BLOCK_TOKENS = 16
BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS  # of a prompt, which are full
PASSED = 3  # blocks that pass before one is struck


class Phase(enum.Enum):
    """What happens to the disk in every case, in this order."""

    WRITTEN = "written"  # a prompt, which the workers on one side have never seen
    OPENED = "opened"  # by the next life of the node
    READ = "read"  # for the workers of the other side


@dataclass(frozen=True)
class DiskCase:
    """An operation on one of the disk's files, and a blow.

    Attributes:
        operation: file and what is done with it.
        found: leading blocks of the prompt that are read afterwards; None where chance has a say.
    """

    operation: str
    moment: faults_pb2.Moment.ValueType
    blow: Blow
    found: int | None = None

    @property
    def name(self) -> str:
        """As the table shows it."""
        moment = "called" if self.moment == CALLED else "answered"
        return f"disk {self.phase.value}/{self.operation}.{moment}, {self.blow.value}"

    @property
    def phase(self) -> Phase:
        """In which it comes first."""
        if self.operation == "blocks.read":
            return Phase.READ
        return Phase.WRITTEN if self.operation.endswith("write") else Phase.OPENED

    @property
    def method(self) -> str:
        """See Aim, like the next two."""
        return f"disk.{self.operation}"

    @property
    def field(self) -> str:
        """None."""
        return ""

    @property
    def skip(self) -> int:
        """Operations that pass."""
        return 0 if self.phase is Phase.OPENED else PASSED

    @property
    def turns_off(self) -> bool:
        """Whether the node has to do without its disk for a while."""
        return self.blow in (Blow.FAIL, Blow.FULL)

    @property
    def damages(self) -> bool:
        """Whether a block is found out not to be what it was."""
        return self.blow is Blow.CORRUPT and self.operation.startswith("blocks.")


def disk_cases() -> Iterator[DiskCase]:
    """Every case."""
    yield DiskCase("blocks.write", CALLED, Blow.FAIL, PASSED)
    yield DiskCase("blocks.write", CALLED, Blow.FULL, PASSED)
    yield DiskCase("blocks.write", CALLED, Blow.DELAY, BLOCKS)
    yield DiskCase("blocks.write", CALLED, Blow.LOSE, BLOCKS)
    yield DiskCase("blocks.write", CALLED, Blow.CORRUPT, PASSED)
    yield DiskCase("blocks.write", CALLED, Blow.KILL_SERVER, PASSED)
    yield DiskCase("blocks.write", ANSWERED, Blow.KILL_SERVER, PASSED)
    yield DiskCase("headers.write", CALLED, Blow.FULL, PASSED)
    yield DiskCase("headers.write", CALLED, Blow.CORRUPT, PASSED)
    yield DiskCase("headers.write", CALLED, Blow.KILL_SERVER, PASSED)
    yield DiskCase("headers.write", ANSWERED, Blow.KILL_SERVER, PASSED + 1)
    for blow in (Blow.FAIL, Blow.FULL, Blow.LOSE, Blow.KILL_SERVER):
        yield DiskCase("blocks.open", CALLED, blow)
    for blow in (Blow.FAIL, Blow.DELAY, Blow.CORRUPT, Blow.KILL_SERVER):
        yield DiskCase("headers.read", ANSWERED, blow)
    yield DiskCase("blocks.read", CALLED, Blow.FAIL, PASSED)
    for blow in (Blow.DELAY, Blow.LOSE, Blow.KILL_SERVER, Blow.CANCEL):
        yield DiskCase("blocks.read", CALLED, blow)
    yield DiskCase("blocks.read", ANSWERED, Blow.CORRUPT, PASSED)
    yield DiskCase("blocks.read", ANSWERED, Blow.KILL_SERVER)
