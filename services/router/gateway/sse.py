"""Server-sent events: one open stream, its heartbeat and its patience with a slow reader."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from aiohttp import web

from services.router.gateway.json_text import Json, encode
from services.router.gateway.settings import GatewaySettings
from twostroke.errors import Cancelled

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # proxies in the manner of nginx hold events back otherwise
}
PING = b": ping\n\n"  # a comment: readers skip it, idle timers do not
DONE = b"data: [DONE]\n\n"


class EventStream:
    """The event stream of one request. Nothing is sent before `open`.

    A send waits while the client is behind, so a slow reader slows the generation it asked for; one that does not read
    at all is cut off. Leaving the block ends the heartbeat.
    """

    def __init__(self, http: web.Request, settings: GatewaySettings) -> None:
        self._http = http
        self._heartbeat_seconds = settings.http_heartbeat_seconds
        self._stall_seconds = settings.http_stall_seconds
        self._response = web.StreamResponse(headers=HEADERS)
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.Lock()
        self._last_write = 0.0
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def opened(self) -> bool:
        """Whether the status line left, so that errors can only be events."""
        return self._response.prepared

    async def open(self, headers: dict[str, str]) -> None:
        """Send the status line and the headers, and start the heartbeat."""
        self._response.headers.update(headers)
        try:
            await self._response.prepare(self._http)
        except ConnectionError as error:
            raise Cancelled("the client left") from error
        self._last_write = self._loop.time()
        self._heartbeat = asyncio.create_task(self._beat(), name="sse-heartbeat")

    async def send(self, value: Json) -> None:
        """Send one event. Raises Cancelled when the client left or does not read."""
        await self._write(b"data: " + encode(value) + b"\n\n")

    async def done(self) -> None:
        """Say that the answer is complete. A stream that ends without it was cut off."""
        await self._write(DONE)

    def response(self) -> web.StreamResponse:
        """What the handler returns; the library then writes the end."""
        return self._response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait({self._heartbeat})

    async def _write(self, frame: bytes) -> None:
        async with self._writing:
            try:
                async with asyncio.timeout(self._stall_seconds):
                    await self._response.write(frame)
            except TimeoutError:
                if self._http.transport is not None:
                    self._http.transport.abort()
                raise Cancelled(f"the client read nothing for {self._stall_seconds:g} s") from None
            except ConnectionError as error:
                raise Cancelled("the client left") from error
            self._last_write = self._loop.time()

    async def _beat(self) -> None:
        """Keep proxies with idle timers from cutting a stream that waits."""
        silent = 0.0
        while True:
            await asyncio.sleep(self._heartbeat_seconds - silent)
            silent = self._loop.time() - self._last_write
            if silent < self._heartbeat_seconds:
                continue
            silent = 0.0
            if self._writing.locked():
                continue  # the client is behind: it has enough to read
            try:
                await self._write(PING)
            except Cancelled:
                return  # the connection is gone; the library cancels the handler
