"""`twostroke eval` on a tiny model: a table or JSON, progress apart from data, an exit status that can stop a build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny import Tiny, write_tiny
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke.cli import main
from twostroke.cli.eval import MAX_TEXT_BYTES, Progress

QUICK = ("--max-tokens", "200", "--prompts", "2", "--threads", "1")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = write_tiny(tmp_path / "tiny")
    write_tiny_tokenizer(folder)
    return str(folder)


def run(*argv: str) -> int:
    """The status, whichever way the command ends."""
    try:
        return main(("eval", *argv))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_every_mode_is_measured_by_default_and_printed_as_a_table(
    capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    assert run(tiny, *QUICK) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["WEIGHTS", "f32", "f16", "bf16", "int8"]
    assert "199 tokens scored in windows of at most 2048, 2 answers of 64 tokens, all against f32" in captured.out
    assert "loading tiny as int8" in captured.err
    assert "int8 reads: 200 of 200 tokens" in captured.err


def test_json_is_one_line_with_every_number(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert run(tiny, *QUICK, "--mode", "int8", "--mode", "bf16", "--mode", "int8", "--against", "f16", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    matrices = [tensor for tensor in Tiny().tensors().values() if tensor.ndim == 2]
    vectors = sum(tensor.size for tensor in Tiny().tensors().values() if tensor.ndim == 1)
    assert (told["model"], told["against"]["weights"], told["window_tokens"]) == ("tiny", "f16", 2_048)
    assert told["against"]["weight_bytes"] == 2 * sum(each.size for each in matrices) + 4 * vectors
    int8, bf16 = told["modes"]
    assert (int8["weights"], bf16["weights"]) == ("int8", "bf16")
    assert int8["weight_bytes"] == sum(each.size + 4 * each.shape[0] for each in matrices) + 4 * vectors
    assert int8["tokens"] == bf16["tokens"] == 199
    assert int8["kl_mean"] > bf16["kl_mean"] > 0
    assert int8["broken"] == []


def test_a_broken_limit_is_status_1_and_is_told_beside_the_data(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert run(tiny, *QUICK, "--mode", "int8", "--max-cost", "kl_max=0,perplexity=10000%", "--json") == 1
    captured = capsys.readouterr()
    (words,) = json.loads(captured.out)["modes"][0]["broken"]
    assert words.startswith("largest divergence in nats is ")
    assert f"twostroke: int8: {words}" in captured.err


def test_a_text_of_ones_own_is_read(capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("Äpfel <|im_end|> und Birnen sind beide Obst.", encoding="utf-8")
    assert run(tiny, *QUICK, "--mode", "f16", "--text", str(text), "--window", "16", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    size = len(text.read_bytes())  # a token is a byte, and the name of a control token is text like any other
    assert told["modes"][0]["tokens"] == size - -(-size // 16)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--text", "/nowhere.txt"], "cannot read /nowhere.txt"),
        (["--window", "1"], "--window 1: must lie between 2 and 2048"),
        (["--window", "2049"], "--window 2049: must lie between 2 and 2048"),
        (["--prompts", "0"], "--prompts 0: must lie between 1 and 64"),
        (["--max-tokens", "1"], "--max-tokens 1: must lie between"),
        (["--threads", "0"], "--threads 0: must lie between 1 and"),
        (["--mode", "int7"], "invalid choice: 'int7' (choose from"),
        (["--max-cost", "kl"], "--max-cost: kl is no limit"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tiny: str, argv: list[str], said: str
) -> None:
    assert run(tiny, *argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "loading" not in captured.err


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe", "invalid start byte"), (b"x" * (MAX_TEXT_BYTES + 1), "is larger than 8388608 bytes")],
)
def test_a_text_that_is_too_large_or_no_utf8_is_refused(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path, content: bytes, said: str
) -> None:
    text = tmp_path / "text"
    text.write_bytes(content)
    assert run(tiny, "--text", str(text)) == 2
    assert said in capsys.readouterr().err


def test_a_text_that_is_too_short_fails(capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("short")
    assert run(tiny, "--text", str(text)) == 1
    assert "the text has 5 tokens; at least 33 are needed" in capsys.readouterr().err


def test_progress_is_noted_once_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for done in range(1, 1_001):
        progress.tell("int8 reads", done, 1_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0] == "int8 reads: 1 of 1,000 tokens"
    assert lines[-1] == "int8 reads: 1,000 of 1,000 tokens"
