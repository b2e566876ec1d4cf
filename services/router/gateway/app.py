"""Routes of the HTTP door, and the server behind them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from services.router.access import Access
from services.router.gateway.advice import advised_json, parse_advice
from services.router.gateway.answer import Answer, StreamedAnswer, WholeAnswer
from services.router.gateway.body import REQUEST_ID_HEADER, read_body, request_id, request_seconds
from services.router.gateway.chat import ChatForm
from services.router.gateway.completions import CompletionForm
from services.router.gateway.draft import Draft, Form
from services.router.gateway.errors import as_domain, error_body, error_headers
from services.router.gateway.generator import Generator
from services.router.gateway.json_text import Json, decode, encode
from services.router.gateway.malformed import ConnectionLog
from services.router.gateway.models import model, model_list, require_models
from services.router.gateway.parse import Asked, naming, parse_chat, parse_completion
from services.router.gateway.relay import Relay
from services.router.gateway.settings import GatewaySettings
from services.router.gateway.sse import EventStream
from twostroke.access.caller import Caller
from twostroke.errors import Cancelled, Unavailable
from twostroke.rpc.gate import Gate
from twostroke.telemetry import log_fields, traceparent_of
from twostroke.types import Advice

P = TypeVar("P")
Parse: TypeAlias = Callable[[Json, str, Caller], Asked]

REQUEST_ID = web.RequestKey("request_id", str)
CALLER = web.RequestKey("caller", Caller)
KEEPALIVE_SECONDS = 75.0
INLINE_BODY_BYTES = 64 << 10  # bodies up to this size are read on the event loop
EXPEL_SECONDS = 2.0  # for the last error events to leave


class Door:
    """The handlers. Everything but liveness and readiness asks who calls; what generates passes through the gate."""

    def __init__(self, settings: GatewaySettings, generator: Generator, gate: Gate, access: Access) -> None:
        self._settings = settings
        self._generator = generator
        self._gate = gate
        self._access = access

    def application(self) -> web.Application:
        """The routes; around them who calls, and around that errors and request ids."""
        app = web.Application(middlewares=[_guard, self._admit], client_max_size=self._settings.http_body_bytes)
        app.on_response_prepare.append(_name)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/v1/cache/keep", self._keep),
                web.post("/v1/cache/release", self._release),
                web.post("/v1/cache/prefetch", self._prefetch),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/health", self._ready),
                web.get("/health/live", self._live),
                web.get("/health/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tell who calls. Public are two handlers, not paths: what leads elsewhere, or nowhere, needs a key."""
        if request.match_info.handler not in (self._live, self._ready):
            request[CALLER] = self._access.caller(request.headers.getall("Authorization", ()))
        return await handler(request)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, parse_chat, ChatForm(self._generator))

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, parse_completion, CompletionForm(self._generator))

    async def _generate(self, http: web.Request, parse: Parse, form: Form) -> web.StreamResponse:
        """Answer, or fail: with a status, or once the stream is open with an error event and no [DONE]."""
        async with EventStream(http, self._settings) as events:
            try:
                async with self._gate.entered():
                    return await self._answer(http, events, parse, form)
            except Cancelled:
                raise
            except Exception as error:
                if not events.opened:
                    raise
                await events.send(error_body(as_domain(error)))
                return events.response()

    async def _answer(self, http: web.Request, events: EventStream, parse: Parse, form: Form) -> web.StreamResponse:
        require_models(self._generator)
        deadline = asyncio.get_running_loop().time() + request_seconds(http, self._settings.http_request_seconds)
        asked = await self._parsed(http, parse)
        draft = Draft(asked, form, request_id=http[REQUEST_ID], created=int(time.time()))
        answer: Answer = StreamedAnswer(draft, form, asked, events) if asked.stream else WholeAnswer(draft)
        parent = traceparent_of(http.headers)
        requests = [replace(each, traceparent=parent) for each in asked.requests]
        with naming(asked.names):
            return await Relay(self._generator, answer, deadline).run(requests)

    async def _keep(self, http: web.Request) -> web.StreamResponse:
        return await self._advise(http, Advice.KEEP)

    async def _release(self, http: web.Request) -> web.StreamResponse:
        return await self._advise(http, Advice.RELEASE)

    async def _prefetch(self, http: web.Request) -> web.StreamResponse:
        return await self._advise(http, Advice.PREFETCH)

    async def _advise(self, http: web.Request, advice: Advice) -> web.StreamResponse:
        async with self._gate.entered():
            require_models(self._generator)
            deadline = asyncio.get_running_loop().time() + request_seconds(http, self._settings.http_request_seconds)
            request = await self._parsed(http, partial(parse_advice, advice))
            request = replace(request, traceparent=traceparent_of(http.headers))
            return _json(advised_json(advice, await self._generator.advise(advice, request, deadline)))

    async def _parsed(self, http: web.Request, parse: Callable[[Json, str, Caller], P]) -> P:
        body = await read_body(http, self._settings.http_body_seconds)

        def read() -> P:
            return parse(decode(body), http[REQUEST_ID], http[CALLER])

        # Megabytes take long enough to be noticed in everybody's stream.
        return read() if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(read)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return _json(model_list(self._generator))

    async def _model(self, http: web.Request) -> web.StreamResponse:
        return _json(model(self._generator, http.match_info["model"]))

    async def _live(self, _: web.Request) -> web.StreamResponse:
        return _json({"status": "live"})

    async def _ready(self, _: web.Request) -> web.StreamResponse:
        reason = "draining" if self._gate.closed else self._generator.readiness
        if reason is not None:
            raise Unavailable(reason, retry_after=1)
        return _json({"status": "ready"})

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._generator.render_metrics(), headers={"Content-Type": kind})


@asynccontextmanager
async def http_door(
    settings: GatewaySettings, generator: Generator, gate: Gate, access: Access, *, drain_seconds: float
) -> AsyncIterator[str]:
    """Serve inside the block, which gets the address. Leaving it closes the gate and drains.

    While open calls finish, for at most `drain_seconds`, new ones are told to come back elsewhere; what is left then
    ends with an error.
    Raises: Unavailable, when the address cannot be bound.
    """
    runner = web.AppRunner(
        Door(settings, generator, gate, access).application(),
        access_log=None,
        logger=ConnectionLog(logging.getLogger(__name__)),
        auto_decompress=False,  # encoded bodies are refused
        handler_cancellation=True,  # a client that leaves takes its request with it, streamed or not
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=EXPEL_SECONDS,
    )
    await runner.setup()
    try:
        await _listen(runner, settings)
        yield f"{settings.http_listen.rpartition(':')[0]}:{runner.addresses[0][1]}"
        gate.close()
        if not await gate.drained(drain_seconds):
            gate.expel()
            await gate.drained(EXPEL_SECONDS)
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, settings: GatewaySettings) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        raise Unavailable(f"cannot listen on {settings.http_listen}: {error.strerror}") from error


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id and every error the API's shape."""
    request[REQUEST_ID] = request_id(request)
    log_fields.set({"request_id": request[REQUEST_ID]})
    try:
        return await handler(request)
    except Exception as error:  # noqa: BLE001 - every error becomes a response here, and a defect is logged
        domain = as_domain(error)
        headers = error_headers(domain)
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = error.headers["Allow"]
        return _json(error_body(domain), status=domain.http, headers=headers)


async def _name(http: web.Request, response: web.StreamResponse) -> None:
    response.headers[REQUEST_ID_HEADER] = http.get(REQUEST_ID) or request_id(http)


def _json(value: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json", status=status, headers=headers)
