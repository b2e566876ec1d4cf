"""What is concluded: a table of movers by blocks in a call, and ratios with their aims."""

from __future__ import annotations

from bench.figures import Figures, Ratio
from bench.store.ground import BLOCK_BYTES, COUNTS

MEMCPY, RAW = "memcpy", "raw socket"
ARENA_PUT, ARENA_GET = "arena put", "arena get"
STREAM_PUT, STREAM_GET = "gRPC put", "gRPC get"
DISK_PUT, DISK_GET = "disk put", "disk get"
PEER_TCP, PEER_GRPC = "peer TCP", "peer gRPC"
LINK_RAW, LINK_TCP, LINK_GRPC = "raw socket, veth", "peer TCP, veth", "peer gRPC, veth"
REDIS_SET, REDIS_GET = "Redis SET", "Redis GET"
NIXL, NIXL_NEAR, MOONCAKE = "NIXL, TCP", "NIXL, own choice", "Mooncake, TCP"
MOVERS = (
    *(MEMCPY, ARENA_PUT, ARENA_GET, STREAM_PUT, STREAM_GET, DISK_PUT, DISK_GET),
    *(RAW, PEER_TCP, PEER_GRPC, REDIS_SET, REDIS_GET, NIXL, NIXL_NEAR, MOONCAKE),
    *(LINK_RAW, LINK_TCP, LINK_GRPC),
)

CALLS = "calls"
LOOKUP, REDIS_LOOKUP = "lookup of 12,500 inside the node, ms", "lookup of 12,500 over 3 Redis, ms"
CONTROL, BARE = "control round trip, ms", "bare grpc.aio round trip, ms"

AIMS = {  # over what, at least
    ARENA_PUT: (MEMCPY, 0.7),
    ARENA_GET: (MEMCPY, 0.7),
    PEER_TCP: (RAW, 0.8),
    PEER_GRPC: (RAW, 0.4),
    LINK_TCP: (LINK_RAW, 0.8),
    LINK_GRPC: (LINK_RAW, 0.4),
}
RIVALS = (REDIS_GET, NIXL, MOONCAKE)  # of PEER_TCP; what NIXL chooses on one host is a copy by the kernel, no network


def rate(count: int) -> str:
    """The figure of calls of `count` blocks: GB/s."""
    return f"GB/s, {count} blocks"


def ratios(figures: Figures) -> dict[str, Ratio]:
    """Every ratio both of whose sides were measured."""
    found: dict[str, Ratio] = {}
    for who, (base, aim) in AIMS.items():
        for count in COUNTS:
            _over(found, figures, f"{who} / {base}, {count} blocks", (who, base, rate(count)), aim)
    for rival in RIVALS:
        for count in COUNTS:
            _over(found, figures, f"{PEER_TCP} / {rival}, {count} blocks", (PEER_TCP, rival, rate(count)), 1.0)
    lookup, theirs = figures.median(CALLS, LOOKUP), figures.median(CALLS, REDIS_LOOKUP)
    control, bare = figures.median(CALLS, CONTROL), figures.median(CALLS, BARE)
    if lookup is not None:
        found["lookup of 12,500 / 5 ms"] = Ratio(lookup / 5.0, 1.0, "lower")
    if lookup is not None and theirs is not None:
        found["lookup of 12,500 / over 3 Redis"] = Ratio(lookup / theirs, 1.0, "lower")
    if control is not None and bare is not None:
        found["control round trip / bare call"] = Ratio(control / bare, 1.3, "lower")
    return found


def print_figures(figures: Figures) -> None:
    """Medians: GB/s and microseconds a block for each mover, then the calls."""
    heads = "".join(f"{count:>9}" for count in COUNTS)
    print(f"{'medians':22}{'GB/s at':>9}{heads}{'µs a block at':>16}{heads}   blocks in a call")
    for who in MOVERS:
        rates = [figures.median(who, rate(count)) for count in COUNTS]
        speed = "".join(f"{'-' if each is None else f'{each:.2f}':>9}" for each in rates)
        each_block = "".join(f"{'-' if each is None else f'{micros(each):.0f}':>9}" for each in rates)
        print(f"{who:22}{'':9}{speed}{'':16}{each_block}")
    print()
    for what in (LOOKUP, REDIS_LOOKUP, CONTROL, BARE):
        value = figures.median(CALLS, what)
        print(f"{what:40}{'-' if value is None else f'{value:.3f}':>10}")


def micros(gb_per_second: float) -> float:
    """Microseconds a block at a rate."""
    return BLOCK_BYTES / gb_per_second / 1e3


def _over(found: dict[str, Ratio], figures: Figures, name: str, sides: tuple[str, str, str], aim: float) -> None:
    who, base, what = sides
    above, below = figures.median(who, what), figures.median(base, what)
    if above is not None and below is not None:
        found[name] = Ratio(above / below, aim, "higher")
