"""A router that plays scripts over real gRPC, for tests of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from twostroke import wire
from twostroke.client import Client
from twostroke.rpc.server import ServerSettings, serving
from twostroke.types import ChoiceFinished, Delta, Event, FinishReason, Started, Token, Usage
from twostroke.v1 import router_pb2, router_pb2_grpc, worker_pb2

Step = Event | Exception | asyncio.Event
PROMPT_TOKENS = 3


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Plays one script a try; the last one again and again."""

    full_name = "twostroke.v1.RouterService"

    def __init__(self, *scripts: Callable[[router_pb2.GenerateRequest], Iterable[Step]]) -> None:
        self.scripts = scripts
        self.requests: list[router_pb2.GenerateRequest] = []
        self.remaining: list[float] = []
        self.left = asyncio.Event()

    def register(self, server: Any) -> None:
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.remaining.append(context.time_remaining())
        try:
            for step in script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield wire.event_pb(step, output=request.output)
        finally:
            self.left.set()

    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        self.remaining.append(context.time_remaining())
        return router_pb2.ListModelsResponse(models=[worker_pb2.ModelInfo(id="tiny", context_tokens=256)])

    async def GetStatus(self, request: Any, context: Any) -> router_pb2.GetStatusResponse:
        self.remaining.append(context.time_remaining())
        return router_pb2.GetStatusResponse(reason="no decode worker", open_requests=2)


def started(request: router_pb2.GenerateRequest) -> Started:
    return Started(
        request_id=request.request_id,
        model="tiny",
        seed=request.sampling.seed,
        prompt_tokens=PROMPT_TOKENS,
        fingerprint="fp",
    )


def delta(text: str, *ids: int) -> Delta:
    return Delta(choice=0, sequence=1, text=text, tokens=tuple(Token(each) for each in ids), total_tokens=len(ids))


def answer(request: router_pb2.GenerateRequest) -> list[Step]:
    usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=3)
    return [started(request), delta("He", 1, 2), delta("y", 3), ChoiceFinished(0, FinishReason.LENGTH), usage]


@asynccontextmanager
async def talking_to(router: ScriptedRouter) -> AsyncIterator[Client]:
    async with (
        serving(ServerSettings(drain_seconds=1.0), router) as server,
        Client(server.address) as client,
    ):
        yield client
