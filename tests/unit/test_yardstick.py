"""Measuring real (tiny) models against each other: windows, passes and answers are what one pass would say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.tiny import write_tiny
from twostroke.engine.passages import Passages, cut
from twostroke.engine.reading import continued
from twostroke.engine.weights import LoadedModel, WeightMode, load_model
from twostroke.engine.yardstick import ANSWER_TOKENS, Yardstick, torch_threads
from twostroke.errors import InvalidRequest

TEXT = [(7 * n * n + 3 * n) % 256 for n in range(1_300)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[WeightMode, LoadedModel]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    return {mode: load_model(folder, mode=mode, backend=CPU) for mode in WeightMode}


def passages(window: int) -> Passages:
    return cut(TEXT, bos=None, window=window, prompts=3, prompt_tokens=8)


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("window", [7, 64, 65, 600, 1_300])
def test_perplexity_is_that_of_each_window_read_in_one_pass(models: dict[WeightMode, LoadedModel], window: int) -> None:
    def perplexity(loaded: LoadedModel) -> float:
        losses = [
            torch.nn.functional.cross_entropy(
                all_logits(loaded, each)[:-1].double(), torch.tensor(each[1:]), reduction="none"
            )
            for each in passages(window).windows
        ]
        return math.exp(float(torch.cat(losses).mean()))

    f32, int8 = models[WeightMode.F32], models[WeightMode.INT8]
    cost, _ = Yardstick(f32, passages(window), silent).measure(int8)
    assert cost.tokens == sum(len(each) - 1 for each in passages(window).windows)
    assert cost.reference_perplexity == pytest.approx(perplexity(f32), rel=1e-4)
    assert cost.perplexity == pytest.approx(perplexity(int8), rel=1e-4)


def test_a_model_against_itself_costs_nothing(models: dict[WeightMode, LoadedModel]) -> None:
    f32 = models[WeightMode.F32]
    cost, alike = Yardstick(f32, passages(200), silent).measure(f32)
    assert (cost.kl_max, cost.top1, cost.logit) == (0, 1, 0)
    assert alike.least == ANSWER_TOKENS


def test_finer_values_cost_less(models: dict[WeightMode, LoadedModel]) -> None:
    yardstick = Yardstick(models[WeightMode.F32], passages(200), silent)
    costs = {mode: yardstick.measure(loaded)[0].kl_mean for mode, loaded in models.items()}
    assert costs[WeightMode.F32] == 0
    assert 0 < costs[WeightMode.F16] < costs[WeightMode.BF16]
    assert 0 < costs[WeightMode.F16] < costs[WeightMode.INT8]


def test_answers_are_the_likeliest_tokens_one_after_another(models: dict[WeightMode, LoadedModel]) -> None:
    loaded, prompts = models[WeightMode.F32], [TEXT[:9], TEXT[30:35], TEXT[50:51]]
    counts: list[int] = []
    answers = continued(loaded, prompts, 12, counts.append)
    assert counts == list(range(1, 13))
    for prompt, answer in zip(prompts, answers, strict=True):
        best = all_logits(loaded, [*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == list(answer)


def test_progress_is_told_to_the_end(models: dict[WeightMode, LoadedModel]) -> None:
    told: list[tuple[str, int, int]] = []
    yardstick = Yardstick(models[WeightMode.F32], passages(700), lambda *each: told.append(each))
    yardstick.measure(models[WeightMode.INT8])
    assert [each for each in told if each[0] == "int8 reads"] == [
        ("int8 reads", done, 1_300) for done in (512, 700, 1_212, 1_300)
    ]
    assert {("f32 answers", 64, 64), ("int8 answers", 64, 64)} <= set(told)


def test_models_of_different_vocabularies_are_refused(models: dict[WeightMode, LoadedModel], tmp_path: Path) -> None:
    larger = load_model(write_tiny(tmp_path, vocab=300), mode=WeightMode.F32, backend=CPU)
    with pytest.raises(InvalidRequest, match="different vocabularies"):
        Yardstick(models[WeightMode.F32], passages(200), silent).measure(larger)


def test_threads_are_as_before_after_the_block() -> None:
    before = torch.get_num_threads()
    with torch_threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
