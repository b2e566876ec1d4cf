"""A wire of our own: a network namespace, joined to ours by a veth pair."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND_SECONDS = 10.0
HERE, THERE = "10.213.{}.1", "10.213.{}.2"


class NoLink(Exception):
    """It cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the other host's process runs, and at which address."""

    address: str
    prefix: tuple[str, ...] = ()


LOOPBACK = Place("127.0.0.1")


@contextmanager
def linked() -> Iterator[Place]:
    """A place behind a link for the length of the block. Raises NoLink."""
    if shutil.which("ip") is None:
        raise NoLink("there is no ip command (Debian: iproute2)")
    number = os.getpid()
    name, near, far, net = f"bench{number}", f"bn{number}", f"bf{number}", number % 256
    _ip("netns", "add", name)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("addr", "add", f"{HERE.format(net)}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "addr", "add", f"{THERE.format(net)}/30", "dev", far)
        for each in (far, "lo"):
            _ip("-n", name, "link", "set", each, "up")
        yield Place(THERE.format(net), ("ip", "netns", "exec", name))
    finally:
        _ip("netns", "delete", name)  # and the pair with it


def _ip(*words: str) -> None:
    try:
        subprocess.run(("ip", *words), check=True, capture_output=True, timeout=COMMAND_SECONDS)
    except subprocess.CalledProcessError as error:
        raise NoLink(f"ip {' '.join(words)}: {error.stderr.decode(errors='replace').strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLink(f"ip {' '.join(words)}: {error}") from error
