"""ChatTemplate: a conversation as the text its model was trained on, in segments that keep callers' text plain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError

from twostroke.errors import InvalidRequest
from twostroke.text.bundle import TokenizerBundle
from twostroke.text.meter import Meter, TemplateLimits
from twostroke.text.provenance import Marking, Provenance
from twostroke.text.sandbox import METER, compile_template
from twostroke.text.segment import Segment

MAX_MESSAGE_CHARACTERS = 500  # of a template's own error message, passed on to the caller

_Chat = list[dict[str, object]]
_END = "\ue000end of the final message\ue000 "  # the space tells whether the template trims; see `_cut`
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "strftime_now", METER})
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """Renders conversations by a model's template, as transformers' `apply_chat_template` does.

    Rendering takes two or more passes of the template and belongs in a thread when conversations are long. Immutable;
    may be shared between threads.
    """

    def __init__(
        self,
        source: str,
        *,
        control_names: Sequence[str],
        bos_token: str | None = None,
        eos_token: str | None = None,
        limits: TemplateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compile `source`, in which `control_names` are the tokens that only the template itself may write.

        `clock` counts seconds, for the limit on them. Raises: ModelError, if it does not compile.
        """
        self._template = compile_template(source)
        self._provenance = Provenance(control_names)
        names = {"bos_token": bos_token, "eos_token": eos_token}
        self._names = {key: name for key, name in names.items() if name is not None}
        self._limits = limits or TemplateLimits()
        self._clock = clock

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle, *, limits: TemplateLimits | None = None) -> ChatTemplate:
        """The template of `bundle`.

        Raises:
            InvalidRequest: the model has none, so it cannot hold conversations.
            ModelError: it does not compile.
        """
        if bundle.chat_template is None:
            raise InvalidRequest("this model has no chat template; send a prompt instead", field="messages")
        return cls(
            bundle.chat_template,
            control_names=[special.text for special in bundle.specials],
            bos_token=bundle.bos_token,
            eos_token=bundle.eos_token,
            limits=limits,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        fold_system: bool = False,
        now: datetime | None = None,
    ) -> list[Segment]:
        """The conversation's text. Nothing in messages, tools or variables becomes a control token.

        Args:
            messages: with `role`, `content` and whatever else the template reads; JSON-like values.
            tools: functions the model may call, as JSON schemas.
            variables: further names for the template, such as `enable_thinking`.
            add_generation_prompt: end with the start of the assistant's turn.
            continue_final_message: end inside the last message, the assistant's, instead.
            fold_system: put system messages in front of the next user turn, for templates that refuse the role.
            now: the time a template may print; the local time by default.
        Raises: InvalidRequest, naming `messages` with the template's own words when it refuses them, or another field.
        """
        chat = _checked(messages)
        chat = _folded(chat) if fold_system else chat
        if continue_final_message and (chat[-1]["role"] != "assistant" or not isinstance(chat[-1].get("content"), str)):
            raise InvalidRequest(
                "only a final assistant message with text can be continued", field="continue_final_message"
            )
        for name in variables or ():
            if name in _RESERVED:
                raise InvalidRequest(f"the template variable {name} cannot be set", field="chat_template_kwargs")
        given = {"messages": chat, "tools": list(tools) if tools else None, **(variables or {})}
        fixed = {
            **self._names,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "strftime_now": _strftime_at(now or datetime.now()),
        }
        return self._segments(given, fixed, continued=continue_final_message)

    def _segments(self, given: dict[str, object], fixed: dict[str, object], *, continued: bool) -> list[Segment]:
        text = self._text(given, fixed, continued=continued)
        for marking in Marking:
            marked = {name: self._provenance.marked(value, marking) for name, value in given.items()}
            try:
                evidence = self._text(marked, fixed, continued=continued)
            except InvalidRequest:  # the marks changed the template's mind, so they prove nothing
                continue
            if (segments := self._provenance.segments(text, evidence)) is not None:
                return segments
        raise InvalidRequest(
            "the messages hold the name of a control token, and the chat template treats it apart", field="messages"
        )

    def _text(self, given: dict[str, object], fixed: dict[str, object], *, continued: bool) -> str:
        """One pass of the template."""
        if continued:
            given = {**given, "messages": _with_end(given["messages"])}
        try:
            meter = Meter(self._limits, given, self._clock)
            text = self._template.render({**fixed, **given, METER: meter})
        except _FAILURES as error:
            raise InvalidRequest(
                f"the chat template refuses the messages: {str(error)[:MAX_MESSAGE_CHARACTERS]}", field="messages"
            ) from error
        return _cut(text) if continued else text


def _strftime_at(moment: datetime) -> Callable[[str], str]:
    """What templates call to print the time; a function, since the sandbox lets no datetime through."""

    def strftime_now(format_: str) -> str:
        return moment.strftime(format_)

    return strftime_now


def _checked(messages: Sequence[Mapping[str, object]]) -> _Chat:
    """Copies of `messages`, at least one, each with a role."""
    if not messages:
        raise InvalidRequest("a conversation needs at least one message", field="messages")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise InvalidRequest("each message needs a role", field="messages")
    return [dict(message) for message in messages]


def _folded(chat: _Chat) -> _Chat:
    """System messages become the start of the user turn that follows, or a user turn of their own."""
    folded: _Chat = []
    waiting: list[str] = []
    for message in chat:
        if message["role"] in ("system", "developer"):
            waiting.append(str(message.get("content") or ""))
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": "\n\n".join([*waiting, str(message.get("content") or "")])}
        elif waiting:
            folded.append(_user(waiting))
        waiting = []
        folded.append(message)
    return [*folded, _user(waiting)] if waiting else folded


def _user(paragraphs: Sequence[str]) -> dict[str, object]:
    return {"role": "user", "content": "\n\n".join(paragraphs)}


def _with_end(messages: Any) -> _Chat:
    """`messages` with the end of the last one's content made visible."""
    *earlier, last = messages
    return [*earlier, {**last, "content": f"{last['content']}{_END}"}]


def _cut(text: str) -> str:
    """`text` up to the end of the final message's content.

    A template that trims contents has eaten the mark's space; then the message's own trailing space goes too, as it
    would have without the mark (the rule of transformers).
    """
    end = text.rfind(_END.strip())
    if end < 0:
        raise InvalidRequest("the chat template leaves out the final message", field="continue_final_message")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()
