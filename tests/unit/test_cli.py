"""The command line: what is misused is said with a cure, data goes to standard output, statuses mean something."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke import __version__
from twostroke.cli import VERBS, main
from twostroke.cli.terminal import table
from twostroke.errors import TwostrokeError


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = write_tiny(tmp_path / "tiny")
    write_tiny_tokenizer(folder)
    return str(folder)


def run(*argv: str) -> int:
    """The status, whichever way the command ends."""
    try:
        return main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)


def test_the_version_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_an_unknown_verb_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generat") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "twostroke: unknown command generat; did you mean generate?\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert run(verb, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: twostroke {verb}")
    assert run(verb, "--adress", "x") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"twostroke {verb}: ")
    assert captured.err.count("\n") == 1


def test_checking_prints_the_commands_and_starts_nothing(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert run("up", "--check", "--model", tiny, "--decode", "2", "--port", "0", "--arena-bytes", "1MiB") == 0
    modules = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert modules == [f"services.{name}" for name in ("kvstore", "prefill", "decode", "decode", "router")]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["--weights", "int4"], "int4: must be one of f32, f16, bf16, int8"),
        (["--decode", "17"], "--decode 17: must lie between 1 and 16"),
        (["--model", "/nowhere.gguf"], "there is no model at /nowhere.gguf"),
        (["--arena-bytes", "1000000GiB"], "the arena needs"),
    ],
)
def test_up_refuses_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str], tiny: str, argv: list[str], said: str
) -> None:
    assert run("up", "--model", tiny, "--port", "0", *argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err.splitlines()[0]


def test_up_checks_the_file_of_keys_and_tells_the_router_alone(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    assert run("keys", "new", "--tenant", "search", "--file", str(keys)) == 0
    capsys.readouterr()
    argv = ("up", "--check", "--model", tiny, "--port", "0", "--arena-bytes", "1MiB", "--api-keys", str(keys))
    assert run(*argv) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if f"--api-keys {keys}" in line]
    assert [line.split()[2] for line in told] == ["services.router"]
    keys.write_text(keys.read_text() * 2)
    assert run(*argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"twostroke: --api-keys {keys}: key 2 (line 5): sha256 is that of key 1 (line 1) too\n  try: "
    )


def test_up_refuses_a_busy_port_and_names_the_way_out(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run("up", "--model", tiny, "--port", str(port), "--arena-bytes", "1MiB") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"twostroke: port {port} on 127.0.0.1 is in use or not ours to take"
    assert second == "  try: choose another with --port"


def test_what_cannot_be_reached_fails_with_a_cure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert run("probe", address, "--timeout", "2") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"twostroke: no health from {address}: ")
    assert "\n  try: " in captured.err


def test_every_error_has_a_cure() -> None:
    def kinds(kind: type[TwostrokeError]) -> list[type[TwostrokeError]]:
        return [kind, *(each for child in kind.__subclasses__() for each in kinds(child))]

    assert all(kind.cure for kind in kinds(TwostrokeError))


def test_a_table_is_as_wide_as_its_widest_cells() -> None:
    assert table(("A", "LONG"), [("wide cell", 1), ("x", 22)]) == "A          LONG\nwide cell  1\nx          22"
