"""`twostroke eval`: what weight modes cost in quality, measured on a text; a gate for continuous integration."""

from __future__ import annotations

import importlib.resources
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.cli.eval_report import Finding, Report
from twostroke.cli.gate import MEASURES, Limit, broken, parse_limits
from twostroke.cli.terminal import complain, note, show
from twostroke.engine.device import Device
from twostroke.engine.mode import WeightMode
from twostroke.launcher.refusal import Refusal
from twostroke.settings import Parser

if TYPE_CHECKING:
    from twostroke.engine.passages import Passages

MAX_TEXT_BYTES = 8 << 20
MAX_TOKENS = 1 << 20
DEFAULT_WINDOW = 2_048  # tokens, where the model's context has room for them
MAX_PROMPTS = 64
PROMPT_TOKENS = 32
SAMPLE = "eval.txt"  # beside this file


def run(argv: Sequence[str]) -> int:
    """Run the verb: 0 when every limit holds, 1 when one does not."""
    told = _parser().parse_known(argv)
    limits = parse_limits(told.max_cost)
    _within("--max-tokens", told.max_tokens, 2, MAX_TOKENS)
    _within("--prompts", told.prompts, 1, MAX_PROMPTS)
    _within("--threads", told.threads, 1, os.cpu_count() or 1)
    against = WeightMode(told.against)
    modes = [WeightMode(each) for each in told.mode] or [mode for mode in WeightMode if mode is not against]
    report = _measured(told, against, dict.fromkeys(modes), limits)
    show(report.as_json() if told.json else report.as_table())
    for finding in report.findings:
        for words in finding.broken:
            complain(f"{finding.mode}: {words}")
    return 1 if any(finding.broken for finding in report.findings) else 0


def _parser() -> Parser:
    modes = [mode.value for mode in WeightMode]
    parser = Parser(
        prog="twostroke eval",
        description="Measure on a text what weight modes cost: perplexity, divergence, agreement. Exit 1 over a limit.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        help="a GGUF file, or a Hugging Face folder or id; by default the packaged SmolLM2",
    )
    parser.add_argument(
        "--text", type=Path, help="a UTF-8 file to read; by default prose, lists and code that come with the package"
    )
    parser.add_argument(
        "--mode",
        action="append",
        default=[],
        choices=modes,
        help="weights to measure; may be given again; by default all",
    )
    parser.add_argument("--against", default="f32", choices=modes, help="weights to measure against")
    parser.add_argument("--max-tokens", type=int, default=8_192, help="most tokens of the text to read")
    parser.add_argument(
        "--window", type=int, help="tokens that are read in one go; by default 2048, or the context where that is less"
    )
    parser.add_argument(
        "--prompts", type=int, default=16, help="places of the text from which greedy answers are written"
    )
    parser.add_argument(
        "--device", choices=[device.value for device in Device], default="auto", help="where to compute"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of one operation on a CPU")
    parser.add_argument(
        "--max-cost", default="", metavar="LIMITS", help=f"such as perplexity=1%%,top1=97%%; of {', '.join(MEASURES)}"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    return parser


def _measured(told: Namespace, against: WeightMode, modes: Iterable[WeightMode], limits: Sequence[Limit]) -> Report:
    """Measure each mode, one beside the reference at a time. Loads torch, which answers to --help need not wait for."""
    from twostroke.engine.backends.choice import choose_backend
    from twostroke.engine.matrix import stored_bytes
    from twostroke.engine.weights import LoadedModel, load_model, read_config, read_shapes
    from twostroke.engine.yardstick import ANSWER_TOKENS, Yardstick, torch_threads
    from twostroke.launcher.models import find_model

    path, device = find_model(told.model), Device(told.device)
    config, shapes = read_config(path), read_shapes(path).values()
    window = _window(told.window, config.max_positions)
    passages = _passages(path, told, window)

    def loaded(mode: WeightMode) -> LoadedModel:
        note(f"loading {path.name} as {mode}")
        return load_model(path, mode=mode, backend=choose_backend(device, mode=mode, threads=told.threads))

    with torch_threads(told.threads):
        yardstick, findings = Yardstick(loaded(against), passages, Progress().tell), []
        for mode in modes:
            cost, likeness = yardstick.measure(loaded(mode))
            findings.append(
                Finding(
                    mode=mode,
                    weight_bytes=stored_bytes(shapes, mode),
                    cost=cost,
                    likeness=likeness,
                    broken=broken(limits, cost, likeness),
                )
            )
    return Report(
        model=path.name,
        against=against,
        against_bytes=stored_bytes(shapes, against),
        answer_tokens=ANSWER_TOKENS,
        window_tokens=window,
        findings=findings,
    )


def _passages(path: Path, told: Namespace, window: int) -> Passages:
    from twostroke.engine.passages import cut
    from twostroke.text.loading import load_bundle
    from twostroke.text.tokenizer import Tokenizer

    bundle = load_bundle(path)
    text = Tokenizer(bundle).encode(_text(told.text), allow_special=False)
    return cut(
        text[: told.max_tokens],
        bos=bundle.bos_token_id if bundle.add_bos else None,
        window=window,
        prompts=told.prompts,
        prompt_tokens=PROMPT_TOKENS,
    )


def _text(path: Path | None) -> str:
    """The text to read. Raises Refusal where it cannot be read, is too large or is no UTF-8."""
    if path is None:
        return importlib.resources.files(__package__).joinpath(SAMPLE).read_text(encoding="utf-8")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        if len(raw) > MAX_TEXT_BYTES:
            raise Refusal(f"{path} is larger than {MAX_TEXT_BYTES} bytes", "give a part of it")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"cannot read {path}: {error}", "give --text a readable file in UTF-8") from error


def _window(told: int | None, context: int) -> int:
    if told is None:
        return min(DEFAULT_WINDOW, context)
    _within("--window", told, 2, context)
    return told


def _within(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Refusal(f"{flag} {value}: must lie between {low} and {high}", f"change {flag}")


class Progress:
    """Notes how far long work is, once for each tenth of it."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def tell(self, what: str, done: int, total: int) -> None:
        """Hear of progress: `done` of `total` tokens."""
        tenth = (what, 10 * done // total)
        if tenth != self._last:
            self._last = tenth
            note(f"{what}: {done:,} of {total:,} tokens")
