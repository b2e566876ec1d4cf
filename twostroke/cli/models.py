"""`twostroke models`: what a cluster serves; `twostroke models export-tokenizer DIR`: a tokenizer for load tools."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from twostroke.cli.doors import add_door
from twostroke.cli.terminal import note, show, table
from twostroke.client import Client
from twostroke.cluster import ModelInfo
from twostroke.settings import Parser

EXPORT = "export-tokenizer"
HEADER = ("MODEL", "ARCHITECTURE", "WEIGHTS", "CONTEXT", "VOCABULARY", "FINGERPRINT")


def run(argv: Sequence[str]) -> int:
    """Run the verb."""
    return _export(argv[1:]) if argv[:1] == [EXPORT] else _list(argv)


def _list(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="twostroke models", description=f"List what a cluster serves. See also: twostroke models {EXPORT} --help"
    )
    add_door(parser)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for an answer")
    models = asyncio.run(_ask(parser.parse_known(argv)))
    show(table(HEADER, [_row(model) for model in models]))
    return 0


async def _ask(told: Namespace) -> tuple[ModelInfo, ...]:
    async with Client(told.address, api_key=told.api_key) as client:
        return await client.models(timeout=told.timeout)


def _row(model: ModelInfo) -> tuple[str, ...]:
    sizes = (str(model.context_tokens), str(model.vocab_size))
    return (model.id, model.architecture, model.weight_mode, *sizes, model.fingerprint)


def _export(argv: Sequence[str]) -> int:
    from twostroke.cli.export import export_tokenizer
    from twostroke.launcher.models import find_model
    from twostroke.text.loading import load_bundle

    parser = Parser(prog=f"twostroke models {EXPORT}", description="Write a tokenizer as transformers reads it.")
    parser.add_argument("folder", type=Path, help="where to write; made when it is not there")
    parser.add_argument("--model", default="", help="a GGUF file or a Hugging Face folder; the packaged one by default")
    told = parser.parse_known(argv)
    for path in export_tokenizer(load_bundle(find_model(told.model)), told.folder):
        note(f"wrote {path}")
    return 0
