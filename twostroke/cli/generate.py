"""`twostroke generate`: continue a text."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import aclosing

from twostroke.cli.doors import add_door
from twostroke.cli.terminal import note, show
from twostroke.client import Client
from twostroke.settings import Parser
from twostroke.types import ChoiceFinished, Delta, Started, Usage


def run(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = Parser(prog="twostroke generate", description="Continue PROMPT as it is, without a chat template.")
    parser.add_argument("prompt", help="the text to continue; - reads standard input")
    add_door(parser)
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the most likely token")
    parser.add_argument("--seed", type=int, help="makes a sampled answer repeatable; drawn when absent")
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer; may be given again")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the answer")
    told = parser.parse_known(argv)
    prompt = sys.stdin.read() if told.prompt == "-" else told.prompt
    asyncio.run(generate(prompt, told))
    return 0


async def generate(prompt: str, told: Namespace) -> None:
    """Show the text as it comes, then on standard error what it took. Raises TwostrokeError."""
    seed, ended = 0, ""
    async with Client(told.address, api_key=told.api_key) as client:
        events = client.generate(
            prompt,
            max_tokens=told.max_tokens,
            temperature=told.temperature,
            seed=told.seed,
            stop=tuple(told.stop),
            timeout=told.timeout,
        )
        async with aclosing(events):
            async for event in events:
                match event:
                    case Delta(text=text):
                        show(text, end="")
                    case Started():
                        seed = event.seed
                    case ChoiceFinished():
                        show("")
                        ended = event.reason.value
                    case Usage():
                        note(
                            f"{ended}; prompt {event.prompt_tokens} tokens ({event.cached.total} cached), "
                            f"answer {event.completion_tokens}, seed {seed}"
                        )
