"""Conversations against transformers, over templates of several models and texts that hypothesis makes up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_templates import CHATS, MISTRAL_CHAT, Chat
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke.text.folder import bundle_from_folder
from twostroke.text.segment import any_of
from twostroke.text.template import ChatTemplate
from twostroke.text.tokenizer import Tokenizer

HOSTILE = [name for chat in CHATS for name in chat.controls] + ["<|", "|>", "im_end", "</think>", "<", "user"]
PIECES = st.text(max_size=8) | st.sampled_from(["\n", " ", '"', "\\", "\U000f007c", "é", "中"])
CONTENTS = st.lists(PIECES | st.sampled_from(HOSTILE), max_size=6).map("".join)
BENIGN = st.lists(PIECES, max_size=6).map("".join)


@pytest.fixture(scope="module", params=CHATS, ids=lambda chat: chat.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Chat, Tokenizer]:
    chat: Chat = request.param
    folder = tmp_path_factory.mktemp(chat.name)
    write_tiny_tokenizer(folder, chat_template=chat.source, controls=chat.controls, bos=chat.bos, eos=chat.eos)
    return chat, Tokenizer(bundle_from_folder(folder))


def conversation(chat: Chat, contents: list[str]) -> list[dict[str, Any]]:
    system = [] if chat is MISTRAL_CHAT else [{"role": "system", "content": "be kind"}]
    turns = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    return [*system, *turns]


def rendered(chat: Chat, messages: list[dict[str, Any]]) -> str:
    """What transformers renders."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": chat.bos or "", "eos_token": chat.eos}
    texts, _ = render_jinja_template([messages], chat_template=chat.source, add_generation_prompt=True, **tokens)
    return str(texts[0])


@settings(deadline=None)
@given(contents=st.lists(BENIGN, min_size=1, max_size=3))
def test_a_benign_conversation_is_transformers_text_encoded_at_once(
    model: tuple[Chat, Tokenizer], contents: list[str]
) -> None:
    chat, tokenizer = model
    messages = conversation(chat, contents)
    segments = ChatTemplate.from_bundle(tokenizer.bundle).render(messages)
    text = rendered(chat, messages)
    assert "".join(segment.text for segment in segments) == text
    assert tokenizer.encode_segments(segments) == tokenizer.encode(text, allow_special=True)


@settings(deadline=None)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3))
def test_no_content_changes_the_control_tokens_of_a_conversation(
    model: tuple[Chat, Tokenizer], contents: list[str]
) -> None:
    chat, tokenizer = model
    template = ChatTemplate.from_bundle(tokenizer.bundle)
    messages = conversation(chat, contents)
    honest, hostile = (
        [id_ for id_ in tokenizer.encode_segments(template.render(each)) if id_ >= 256]
        for each in (conversation(chat, ["x"] * len(contents)), messages)
    )
    assert hostile == honest
    plain = "".join(segment.text for segment in template.render(messages))
    assert plain == rendered(chat, messages)
    assert any_of(chat.controls).search(plain) or not honest
