"""Where a handoff can be struck, and how: each point is a message of a call that the path of a request makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.kit.strikes import ANSWERED, CALLED, Blow
from twostroke.v1 import faults_pb2


@dataclass(frozen=True)
class Point:
    """One message: of which call, who serves it, who called, and the stage of the handoff it belongs to.

    Attributes:
        stage: of `twostroke.routing.stages`.
        server: service that answers the call, and in which the fault is armed.
        caller: service at the other end.
        method: as FaultService takes it.
        moment: called, nothing is done yet; or answered, it is done and not yet told.
        field: what the message holds, where messages of one call differ.
        skip: messages of this kind that pass.
    """

    stage: str
    server: str
    caller: str
    method: str
    moment: faults_pb2.Moment.ValueType
    field: str = ""
    skip: int = 0

    @property
    def name(self) -> str:
        """Such as computing/Prefill.first."""
        what = self.field or ("called" if self.moment == CALLED else "answered")
        return f"{self.stage}/{self.method.partition('/')[2]}.{what}{f'+{self.skip}' if self.skip else ''}"


@dataclass(frozen=True)
class Case:
    """A point and a blow."""

    point: Point
    blow: Blow

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.point.name}, {self.blow.value}"

    @property
    def method(self) -> str:
        """See Aim, like the others."""
        return self.point.method

    @property
    def moment(self) -> faults_pb2.Moment.ValueType:
        """See Aim."""
        return self.point.moment

    @property
    def field(self) -> str:
        """See Aim."""
        return self.point.field

    @property
    def skip(self) -> int:
        """See Aim."""
        return self.point.skip


def _both(stage: str, server: str, caller: str, method: str) -> tuple[Point, Point]:
    return (Point(stage, server, caller, method, CALLED), Point(stage, server, caller, method, ANSWERED))


PREFILL, DECODE, STORE = "PrefillService", "DecodeService", "KvStoreService"

POINTS: tuple[Point, ...] = (
    *_both("queued", "kvstore", "router", f"{STORE}/Lookup"),
    Point("computing", "prefill", "router", f"{PREFILL}/Prefill", CALLED),
    *_both("computing", "kvstore", "prefill", f"{STORE}/Reserve"),
    *_both("computing", "kvstore", "prefill", f"{STORE}/Commit"),
    Point("computing", "kvstore", "prefill", f"{STORE}/Commit", ANSWERED, skip=2),
    Point("computing", "prefill", "router", f"{PREFILL}/Prefill", ANSWERED, "progress"),
    *_both("computing", "decode", "router", f"{DECODE}/Prefetch"),
    *_both("computing", "kvstore", "decode", f"{STORE}/Acquire"),
    Point("computing", "prefill", "router", f"{PREFILL}/Prefill", ANSWERED, "first"),
    Point("published", "prefill", "router", f"{PREFILL}/Prefill", ANSWERED, "result"),
    Point("loading", "decode", "router", f"{DECODE}/Decode", CALLED),
    Point("loading", "decode", "router", f"{DECODE}/Decode", ANSWERED, "admission"),
    *_both("owned", "kvstore", "router", f"{STORE}/Release"),
    Point("owned", "decode", "router", f"{DECODE}/Decode", ANSWERED, "tokens", 5),
    Point("owned", "decode", "router", f"{DECODE}/Decode", ANSWERED, "finish"),
)

# A user that leaves, where it is the request itself that waits.
_CANCELLABLE = {"Prefill", "Decode", "Reserve", "Commit", "Lookup"}
# A message whose bytes are checked by whoever reads it.
_CHECKED = {"Acquire", "Commit", "Reserve"}


def cases() -> Iterator[Case]:
    """Every case of the kit. A router is no caller to kill here: its users' connections die with it."""
    for point in POINTS:
        method = point.method.partition("/")[2]
        yield Case(point, Blow.KILL_SERVER)
        if point.caller != "router":
            yield Case(point, Blow.KILL_CALLER)
        yield Case(point, Blow.STOP_SERVER)
        yield Case(point, Blow.FAIL)
        yield Case(point, Blow.DELAY)
        if point.server == "kvstore":
            yield Case(point, Blow.LOSE)
        if method in _CANCELLABLE:
            yield Case(point, Blow.CANCEL)
        if method in _CHECKED and point.moment == ANSWERED:
            yield Case(point, Blow.CORRUPT)
