"""Workers that do not agree on what a block is: refused before the first request, with the name of the field."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from services.decode.assembly import assembled as decode_service
from services.decode.settings import DecodeSettings
from services.prefill.assembly import assembled as prefill_service
from services.prefill.settings import PrefillSettings
from services.router.assembly import assembled as router_service
from services.router.gateway.settings import GatewaySettings
from services.router.settings import RouterSettings
from tests.support.cluster import SERVER, tiny_model
from tests.support.stores import eventually, serving_store
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.errors import FormatMismatch
from twostroke.telemetry import Telemetry

NOWHERE = "127.0.0.1:1"
SPANS = Telemetry(None)
Difference = tuple[dict[str, Any], dict[str, Any], str]

# What is told to decode alone, of the worker and of its model; and the field that is named.
FORMATS: list[Difference] = [
    ({"block_tokens": 32}, {}, "block_tokens"),
    ({"kv_dtype": KvMode.BF16}, {}, "dtype"),
    ({}, {"theta": 20_000.0}, "weights_digest"),
    ({}, {"seed": 1}, "weights_digest"),
]
NAMES: list[Difference] = [({"name": "another"}, {}, "id")]  # of which the store knows nothing


def settings(model: Path, kvstore: str, **told: Any) -> dict[str, Any]:
    common = {"weights": WeightMode.F32, "weights_cache": "off", "kv_bytes": "1MiB", "server": SERVER}
    return {"model": model, "kvstore": kvstore, **common, **told}


@pytest.mark.parametrize(("told", "model", "field"), FORMATS)
async def test_a_worker_of_another_format_does_not_start_beside_the_store_of_the_first(
    tmp_path: Path, told: dict[str, Any], model: dict[str, Any], field: str
) -> None:
    mine, theirs = tiny_model(tmp_path / "a" / "tiny"), tiny_model(tmp_path / "b" / "tiny", **model)
    folder = tmp_path / "arena"
    folder.mkdir()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(serving_store(folder, slots=64))
        await stack.enter_async_context(prefill_service(PrefillSettings(**settings(mine, store.address)), SPANS))
        with pytest.raises(FormatMismatch) as refused:
            await stack.enter_async_context(
                decode_service(DecodeSettings(**settings(theirs, store.address, **told)), SPANS)
            )
        assert refused.value.field == f"kv_format.{field}"


@pytest.mark.parametrize(("told", "model", "field"), FORMATS + NAMES)
async def test_a_worker_of_another_format_gets_no_request_from_a_router(
    tmp_path: Path, told: dict[str, Any], model: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    mine, theirs = tiny_model(tmp_path / "a" / "tiny"), tiny_model(tmp_path / "b" / "tiny", **model)
    async with AsyncExitStack() as stack:
        prefill, _ = await stack.enter_async_context(prefill_service(PrefillSettings(**settings(mine, NOWHERE)), SPANS))
        decode, _ = await stack.enter_async_context(
            decode_service(DecodeSettings(**settings(theirs, NOWHERE, **told)), SPANS)
        )
        router = RouterSettings(
            prefill=(prefill.address,),
            decode=(decode.address,),
            server=SERVER,
            gateway=GatewaySettings(http_listen="127.0.0.1:0"),
        )
        doors = await stack.enter_async_context(router_service(router, SPANS))
        await eventually(lambda: any(f"{field} " in str(vars(record).get("error")) for record in caplog.records))
        assert doors.fleet.readiness is not None
        assert not doors.dispatch.models
