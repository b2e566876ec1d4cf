"""Settings come from flags and environment, and what is wrong with them is said in one line."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.settings import InvalidSetting, load, parse_bytes, setting


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    drain_seconds: float = setting(30.0, help="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Says what it is."""

    model: Path = setting(help="a path")
    threads: int = setting(1, help="a number")
    colour: Colour = setting(Colour.RED, help="a colour")
    peers: tuple[str, ...] = setting((), help="addresses")
    limit: int | None = setting(None, help="maybe a number")
    fast: bool = setting(False, help="yes or no")
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise InvalidSetting("threads", self.threads, "must be at least 1")


def told(*argv: str, **environ: str) -> Outer:
    return load(Outer, prog="thing", argv=["--model", "/m", *argv], environ=environ)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        load(Outer, prog="thing", argv=argv, environ=environ)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error.rstrip()


def test_every_kind_of_field_is_a_flag() -> None:
    settings = told("--threads=3", "--colour", "blue", "--peers", "a:1, b:2", "--limit", "7", "--fast")
    assert settings == Outer(model=Path("/m"), threads=3, colour=Colour.BLUE, peers=("a:1", "b:2"), limit=7, fast=True)


def test_nested_settings_are_flat_to_the_user() -> None:
    assert told("--drain-seconds", "2.5").inner == Inner(drain_seconds=2.5)


def test_every_field_is_a_variable_and_a_flag_wins() -> None:
    assert told(TWOSTROKE_THREADS="4", TWOSTROKE_FAST="yes", TWOSTROKE_PEERS="a:1").threads == 4
    assert told("--threads", "5", TWOSTROKE_THREADS="4").threads == 5


def test_variables_of_others_are_left_alone() -> None:
    assert told(PATH="/bin", TWO="1", TWOSTROKE_CACHE="/c", TWOSTROKE_API_KEY="k") == Outer(model=Path("/m"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--thread", "2"], "thing: unknown option --thread; did you mean --threads?"),
        (["--zzz"], "thing: unknown option --zzz; see --help"),
        (["--threads", "two"], "thing: argument --threads: two: must be a whole number"),
        (["--colour", "green"], "thing: argument --colour: green: must be one of red, blue"),
        (["--drain-seconds", "soon"], "thing: argument --drain-seconds: soon: must be a number"),
        (["--model", "/m", "--threads", "0"], "thing: --threads 0: must be at least 1"),
        ([], "thing: --model : must be given"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert refusal(capsys, *argv) == said


def test_an_unknown_variable_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--model", "/m", TWOSTROKE_THREDS="2")
    assert "unknown variable TWOSTROKE_THREDS; did you mean TWOSTROKE_THREADS?" in said


def test_help_names_every_flag_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        told("--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for words in ("Says what it is.", "--drain-seconds", "(default: 30.0)", "(default: red)", "--no-fast"):
        assert words in text


@given(st.integers(0, 1 << 50))
def test_sizes_in_bytes_and_in_binary_units_agree(count: int) -> None:
    assert parse_bytes("size", str(count)) == count
    assert parse_bytes("size", f"{count >> 20} MiB") == (count >> 20) << 20


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1TiBs", "1 2", "0x10", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="must be a size"):
        parse_bytes("size", text)
