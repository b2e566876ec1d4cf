"""`twostroke chat`: a conversation in the terminal, or one question."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing

from twostroke.cli.doors import Door, Manner, add_door, opened
from twostroke.cli.terminal import complain, note, show
from twostroke.errors import TwostrokeError
from twostroke.settings import Parser
from twostroke.types import Message

PROMPT = "> "
LEAVE = frozenset({"/exit", "/quit"})


def run(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = Parser(prog="twostroke chat", description="Talk with the model; with QUESTION, answer it and leave.")
    parser.add_argument("question", nargs="?", help="one question; absent: a conversation")
    add_door(parser, "host:port (gRPC) or http://host:port (OpenAI API)")
    parser.add_argument("--system", help="instructions that precede the conversation")
    parser.add_argument(
        "--max-tokens", type=int, help="most tokens of one answer; absent: what the context has room for"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the most likely token")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    told = parser.parse_known(argv)
    with asyncio.Runner() as runner:
        doors = AsyncExitStack()
        conversation = Conversation(runner.run(doors.enter_async_context(opened(told.address, told.api_key))), told)
        try:
            if told.question is not None:
                runner.run(conversation.ask(told.question))
            else:
                converse(lambda question: runner.run(conversation.ask(question)))
        finally:
            runner.run(doors.aclose())
    return 0


def converse(ask: Callable[[str], None]) -> None:
    """Read questions until the user leaves. Ctrl-C during an answer stops that answer only."""
    note("/exit or Ctrl-D leaves; Ctrl-C stops an answer")
    while True:
        try:
            question = input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            show("")
            return
        if question in LEAVE:
            return
        if not question:
            continue
        try:
            ask(question)
        except KeyboardInterrupt:
            show(" [stopped]")
        except TwostrokeError as error:
            complain(str(error), error.cure)


class Conversation:
    """What was said so far, and the door it goes through."""

    def __init__(self, door: Door, told: Namespace) -> None:
        self._door = door
        self._manner = Manner(max_tokens=told.max_tokens, temperature=told.temperature, seconds=told.timeout)
        self.messages = [Message(role="system", content=told.system)] if told.system else []

    async def ask(self, question: str) -> None:
        """Show the answer as it comes. What was shown of a stopped answer stays in the conversation."""
        messages = [*self.messages, Message(role="user", content=question)]
        pieces: list[str] = []
        try:
            async with aclosing(self._door.answer(messages, self._manner)) as texts:
                async for text in texts:
                    pieces.append(text)
                    show(text, end="")
        finally:
            if pieces:
                self.messages = [*messages, Message(role="assistant", content="".join(pieces))]
        show("")
