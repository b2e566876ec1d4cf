"""Client channels: limits and keepalive that the server agrees with, one event loop per channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import grpc

from twostroke.errors import Unavailable
from twostroke.limits import MESSAGE_BYTES
from twostroke.rpc.calls import KeptCall

KEEPALIVE_MS = 20_000
_MESSAGES = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
)


def _keepalive(ping_ms: int) -> tuple[tuple[str, int], ...]:
    """What both ends are told: silent connections are pinged for as long as they last, calls or not."""
    return (
        *_MESSAGES,
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def client_options(ping_ms: int) -> tuple[tuple[str, int], ...]:
    """Options of a channel that pings every so many milliseconds."""
    return (
        *_keepalive(ping_ms),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 100),  # how late a worker that comes up is noticed
        ("grpc.min_reconnect_backoff_ms", 1_000),  # what one attempt may take, for all that its name says
        ("grpc.use_local_subchannel_pool", 1),  # a replaced worker must not inherit an old connection's back-off
    )


def server_options(ping_ms: int) -> tuple[tuple[str, int], ...]:
    """Options of a server whose clients ping every so many milliseconds.

    It must allow pings at least as often as they are sent, or it ends long silent calls (GOAWAY, too_many_pings).
    """
    return (
        *_keepalive(ping_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", ping_ms // 2),
        ("grpc.http2.max_ping_strikes", 3),
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a silent share
    )


CLIENT_OPTIONS = client_options(KEEPALIVE_MS)
SERVER_OPTIONS = server_options(KEEPALIVE_MS)

MultiCallable = TypeVar("MultiCallable", bound=Callable[..., object])


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `host:port` for the running event loop; calls from any other loop raise RuntimeError."""
    if not address:
        raise Unavailable("no address to connect to")
    return OneLoopChannel(grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS), asyncio.get_running_loop())


class OneLoopChannel(grpc.aio.Channel):
    """Refuses calls from a loop other than its own: grpc.aio loses wake-ups when loops share its objects."""

    def __init__(self, channel: grpc.aio.Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop

    def _guarded(self, call: MultiCallable) -> MultiCallable:
        def guarded(*args: Any, **kwargs: Any) -> object:
            if asyncio.get_running_loop() is not self._loop:
                raise RuntimeError("this channel belongs to another event loop; hand the work over to that one")
            return call(*args, **kwargs)

        return cast("MultiCallable", guarded)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._guarded(_kept(self._channel.unary_unary(*args, **kwargs)))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._guarded(_kept(self._channel.unary_stream(*args, **kwargs)))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._guarded(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._guarded(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """Close the channel and end its calls."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity now."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the state is no longer the one observed."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when connected."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _kept(multicallable: Callable[..., Any]) -> Callable[..., KeptCall]:
    """Calls that may be left; those whose request is a stream are left alone, as their writes are."""
    return lambda *args, **kwargs: KeptCall(multicallable(*args, **kwargs))
