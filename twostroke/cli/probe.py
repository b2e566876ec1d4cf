"""`twostroke probe`: ask a service for its health, for container health checks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from twostroke.cli.terminal import show
from twostroke.errors import Unavailable
from twostroke.rpc.channel import connect
from twostroke.settings import Parser


def run(argv: Sequence[str]) -> int:
    """Run the verb. Raises Unavailable when the service is not reached or not ready."""
    parser = Parser(prog="twostroke probe", description="Exit 0 when the gRPC service at ADDRESS is ready, 1 if not.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for an answer")
    told = parser.parse_known(argv)
    show(asyncio.run(health(told.address, told.timeout)))
    return 0


async def health(address: str, seconds: float) -> str:
    """The word of grpc.health.v1 for ready. Raises Unavailable for anything else."""
    # The client alone does not install the health package; only this verb needs it.
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    async with connect(address) as channel:
        try:
            check = channel.unary_unary(  # the stub's types know no asyncio
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            answer = await check(HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"no health from {address}: {error.details()}") from error
    name: str = HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != HealthCheckResponse.SERVING:
        raise Unavailable(f"{address} says {name}")
    return name
