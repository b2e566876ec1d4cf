"""Limits on what a weight mode may cost: how they are written, and when they are broken."""

from __future__ import annotations

import pytest

from twostroke.cli.gate import MEASURES, Limit, broken, parse_limits
from twostroke.engine.quality import Cost, Likeness
from twostroke.launcher.refusal import Refusal

COST = Cost(
    tokens=100,
    perplexity=10.1,
    reference_perplexity=10.0,
    perplexity_change=0.01,
    perplexity_error=0.001,
    kl_mean=0.002,
    kl_p99=0.03,
    kl_max=0.4,
    top1=0.97,
    logit=2.5,
)
LIKENESS = Likeness((64, 20, 3))
FOUND = {"perplexity": 0.01, "kl": 0.002, "kl_p99": 0.03, "kl_max": 0.4, "logit": 2.5, "top1": 0.97, "greedy": 20.0}


def test_limits_read_as_they_are_written() -> None:
    assert parse_limits(" perplexity=1%, top1=97.5% ,kl=0.01,greedy=20") == (
        Limit("perplexity", 0.01),
        Limit("top1", 0.975),
        Limit("kl", 0.01),
        Limit("greedy", 20.0),
    )
    assert parse_limits("") == parse_limits("  ") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("perplexty=1%", "unknown measure perplexty; did you mean perplexity"),
        ("perplexity", "perplexity is no limit"),
        ("perplexity=1", "perplexity=1 is no limit"),
        ("perplexity=%", "perplexity=% is no limit"),
        ("kl=1%", "kl=1% is no limit"),
        ("kl=nan", "kl=nan is no limit"),
        ("kl=inf", "kl=inf is no limit"),
        ("kl=0.1,", "unknown measure"),
    ],
)
def test_what_is_not_understood_is_named(text: str, said: str) -> None:
    with pytest.raises(Refusal, match="--max-cost") as caught:
        parse_limits(text)
    assert said in str(caught.value)
    assert all(name in caught.value.cure for name in MEASURES)


@pytest.mark.parametrize("name", MEASURES)
def test_a_limit_that_is_just_met_holds_and_one_just_missed_does_not(name: str) -> None:
    worse = -1e-6 if MEASURES[name].is_least else 1e-6
    assert FOUND[name] == MEASURES[name].take(COST, LIKENESS)
    assert broken([Limit(name, FOUND[name]), Limit(name, FOUND[name] + worse)], COST, LIKENESS) == []
    (words,) = broken([Limit(name, FOUND[name] - worse)], COST, LIKENESS)
    assert MEASURES[name].about in words


def test_a_broken_limit_is_told_in_the_unit_it_was_given_in() -> None:
    assert broken(parse_limits("perplexity=0.5%,top1=99%,kl=0.001"), COST, LIKENESS) == [
        "rise of the perplexity is 1%; at most 0.5% is allowed",
        "share of equal first choices is 97%; at least 99% is allowed",
        "mean divergence in nats is 0.002; at most 0.001 is allowed",
    ]
