"""Hosts on this machine: a network and a /dev/shm of its own each, joined two by two by links that can fail.

A host is a pair of namespaces (network, mounts) that a process holds; it ends with its standard input, so nothing is
left even when the tests are killed. Every two hosts share a veth pair and nothing else, and so do each host and this
process, which stays where it is. Addresses are of the network that RFC 2544 sets aside for tests.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest

from tests.support.processes import HERE, ROOT, Place

COMMAND_SECONDS = 20.0
SHARED_MEMORY = "256m"  # of each host
NOBODY = "02:00:00:00:00:01"  # a hardware address that no interface has

_SET_UP = f"ip link set lo up && mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm && echo up && exec cat"
_networks = itertools.count()


@cache
def why_not() -> str | None:
    """None where hosts can be made, else what is missing."""
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"hosts need the tool {tool}"
    try:
        with _network(["probe"]) as network:
            network.link("probe", "here").slow("1mbit")
    except subprocess.SubprocessError as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        return f"hosts cannot be made here, as with CAP_SYS_ADMIN and CAP_NET_ADMIN they can: {said or error}".strip()
    return None


@cache
def why_no_delay() -> str | None:
    """None where a link can be delayed, else what is missing."""
    netem = ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    told = subprocess.run(netem, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    return f"links cannot be delayed without netem: {told.stderr.strip()}" if told.returncode else None


@dataclass(frozen=True)
class End:
    """One end of a link: where it is, its interface, and who is at the other end."""

    at: Place
    interface: str
    other: Place

    def ip(self, *words: str) -> None:
        """Run `ip` where the end is."""
        _run(self.at, "ip", *words)

    def received(self) -> int:
        """Bytes that arrived at this end."""
        (told,) = json.loads(_run(self.at, "ip", "-json", "-statistics", "link", "show", "dev", self.interface))
        return int(told["stats64"]["rx"]["bytes"])

    def shape(self, *qdisc: str) -> None:
        """Send through this queueing discipline from now on; without one, as fast as the machine can."""
        if qdisc:
            _run(self.at, "tc", "qdisc", "replace", "dev", self.interface, "root", *qdisc)
        else:
            _run(self.at, "tc", "qdisc", "del", "dev", self.interface, "root")


@dataclass
class Link:
    """What joins two hosts. Faults are of both directions, and last until `heal`."""

    ends: tuple[End, End]
    _shaped: bool = False
    _cut: bool = False
    _down: bool = False

    def carried(self) -> int:
        """Bytes that came through so far, in both directions."""
        return sum(end.received() for end in self.ends)

    def slow(self, rate: str) -> None:
        """Let so much through in a second, as `tc` writes it: 1mbit."""
        self._shape("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")

    def delay(self, milliseconds: int) -> None:
        """Let everything arrive later, where `why_no_delay` finds nothing missing."""
        self._shape("netem", "delay", f"{milliseconds}ms", "limit", "10000")

    def cut(self) -> None:
        """Lose whatever is sent, without a word to the sender: frames go to an address that nobody has."""
        self._cut = True
        for end in self.ends:
            end.ip("neigh", "replace", end.other.address, "lladdr", NOBODY, "nud", "permanent", "dev", end.interface)

    def down(self) -> None:
        """Take the interfaces down: senders are told at once that there is no way."""
        self._down = True
        for end in self.ends:
            end.ip("link", "set", end.interface, "down")

    def heal(self) -> None:
        """As new."""
        for end in self.ends:
            if self._cut:
                end.ip("neigh", "del", end.other.address, "dev", end.interface)
            if self._down:
                end.ip("link", "set", end.interface, "up")
            if self._shaped:
                end.shape()
        self._shaped = self._cut = self._down = False

    def _shape(self, *qdisc: str) -> None:
        self._shaped = True
        for end in self.ends:
            end.shape(*qdisc)


@dataclass(frozen=True)
class Network:
    """All hosts by name, and `here`."""

    hosts: Mapping[str, Place]
    _links: dict[frozenset[str], Link] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Place:
        return self.hosts[name]

    def link(self, one: str, other: str) -> Link:
        """What joins these two."""
        return self._links[frozenset((one, other))]

    def among(self, *names: str) -> list[Link]:
        """All that joins these with each other."""
        return [self.link(*pair) for pair in itertools.combinations(names, 2)]

    def heal(self) -> None:
        """Heal every link."""
        for link in self._links.values():
            link.heal()


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Hosts of these names, each joined to all others and to here. Skips the test where none can be made."""
    if reason := why_not():
        pytest.skip(reason)
    with _network(names) as made:
        yield made


@contextmanager
def _network(names: Sequence[str]) -> Iterator[Network]:
    number, base = next(_networks), os.getpid() % 512
    prefix = f"198.{18 + base // 256}.{base % 256}"
    with ExitStack() as stack:
        hosts = {"here": Place(f"{prefix}.254")}
        pids: dict[str, int] = {}
        for at, name in enumerate(names, start=1):
            pids[name] = stack.enter_context(_held())
            hosts[name] = Place(f"{prefix}.{at}", _enter(pids[name]))
        made = Network(hosts)
        for at, (one, other) in enumerate(itertools.combinations(hosts, 2)):
            interface = f"t{os.getpid():x}.{number:x}.{at:x}"  # the kernel takes 15 characters
            made._links[frozenset((one, other))] = stack.enter_context(_link(hosts, pids, one, other, interface))
        yield made


@contextmanager
def _held() -> Iterator[int]:
    """Namespaces of a host, as the process that holds them; gone on leaving, with what is mounted and linked there."""
    command = ("unshare", "--net", "--mount", "sh", "-c", _SET_UP)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise subprocess.CalledProcessError(holder.wait(), command, stderr=holder.stderr.read().decode())
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _enter(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{pid}/ns/mnt", f"--wd={ROOT}", "--")


@contextmanager
def _link(hosts: Mapping[str, Place], pids: Mapping[str, int], one: str, other: str, interface: str) -> Iterator[Link]:
    """A veth pair between two hosts, the first of which may be here. Its ends take their hosts' addresses."""
    first = End(hosts[one], interface, hosts[other])
    second = End(hosts[other], f"{interface}p", hosts[one])
    where = ("netns", str(pids[one])) if one in pids else ()
    peer = ("peer", "name", second.interface, "netns", str(pids[other]))
    _run(HERE, "ip", "link", "add", "name", first.interface, *where, "type", "veth", *peer)
    try:
        for end in (first, second):
            end.ip("addr", "add", end.at.address, "peer", end.other.address, "dev", end.interface)
            end.ip("link", "set", end.interface, "up")
        yield Link((first, second))
    finally:
        first.ip("link", "del", first.interface)


def _run(at: Place, *command: str) -> str:
    """What a command says at a host. Raises CalledProcessError."""
    whole = (*at.enter, *command)
    return subprocess.run(whole, check=True, capture_output=True, text=True, timeout=COMMAND_SECONDS).stdout
