"""A blocking socket with a time limit on every operation, kept by the kernel.

`socket.settimeout` makes a socket non-blocking and polls before each call; SO_RCVTIMEO and SO_SNDTIMEO need no poll,
and let one call fill a whole block (MSG_WAITALL). For threads that do nothing but move bytes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence

_LEAST_SECONDS = 1e-3  # zero would mean no limit


class TimedSocket:
    """A connected TCP socket. All methods but `shut` are for one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._limits: dict[int, float] = {}

    def send(self, parts: Sequence[bytes | memoryview], seconds: float) -> None:
        """Send all bytes of all parts. Raises OSError; TimeoutError, when that takes longer than `seconds`."""
        self._limit(socket.SO_SNDTIMEO, seconds)
        end = time.monotonic() + seconds
        with _views(parts) as left:
            while _rest(left, self._sent(left)):
                _require_time(end)

    def send_now(self, data: bytes) -> int:
        """Send what the kernel takes without waiting; answers how many bytes. The next operation raises what failed."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def receive(self, parts: Sequence[bytearray | memoryview], seconds: float) -> None:
        """Fill all parts. Raises OSError; ConnectionError at the end of the stream; TimeoutError after `seconds`."""
        end = time.monotonic() + seconds
        with _views(parts) as left:
            while _rest(left, self._received(left, socket.MSG_WAITALL, seconds)):
                _require_time(end)

    def receive_some(self, part: memoryview, at_least: int, seconds: float) -> int:
        """Fill at least the beginning of a part, with what has come; answers how many bytes. Raises as `receive`."""
        count, end = self._received([part], 0, seconds), time.monotonic() + seconds
        while count < at_least:
            _require_time(end)
            count += self._received([part[count:]], 0, seconds)
        return count

    def shut(self) -> None:
        """End the conversation, from any thread: what waits for the other side stops waiting."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; no other thread uses it."""
        self._socket.close()

    def _sent(self, parts: list[memoryview]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError as error:
            raise TimeoutError("nobody reads") from error

    def _received(self, parts: list[memoryview], flags: int, seconds: float) -> int:
        self._limit(socket.SO_RCVTIMEO, seconds)
        try:
            moved = self._socket.recvmsg_into(parts, 0, flags)[0]
        except BlockingIOError as error:
            raise TimeoutError("nobody sends") from error
        if not moved:
            raise ConnectionResetError("the other side closed the connection")
        return moved

    def _limit(self, option: int, seconds: float) -> None:
        if self._limits.get(option) != seconds:
            whole, part = divmod(max(seconds, _LEAST_SECONDS), 1.0)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(part * 1e6)))
            self._limits[option] = seconds


@contextlib.contextmanager
def _views(parts: Sequence[bytes | bytearray | memoryview]) -> Iterator[list[memoryview]]:
    """Views that end with the block: the traceback of an error would keep them, and with them the arena, open."""
    views = [memoryview(part) for part in parts]
    try:
        yield views
    finally:
        for each in views:
            each.release()


def _rest(parts: list[memoryview], moved: int) -> list[memoryview]:
    """Drop the bytes that were moved. A call that moves less than all ran into its limit, or a signal came."""
    while parts and moved >= len(parts[0]):
        moved -= len(parts.pop(0))
    if parts:
        parts[0] = parts[0][moved:]
    return parts


def _require_time(end: float) -> None:
    if time.monotonic() >= end:
        raise TimeoutError("the other side is too slow")
