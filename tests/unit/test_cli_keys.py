"""`twostroke keys`: a key is shown once, its hash is kept, and a file that is not sound is not made longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.access.keyfile import digest_of, parse
from twostroke.cli import main
from twostroke.types import Priority


def run(*argv: str) -> int:
    try:
        return main(["keys", *argv])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_a_new_key_is_data_and_its_entry_is_what_the_file_takes(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--tenant", "search", "--namespace", "public", "--priority", "batch", "--label", "nightly, ü"]
    assert run("new", *told) == 0
    out, err = capsys.readouterr()
    (key,) = parse(err.encode())
    assert key.digest == digest_of(out.rstrip("\n"))
    assert (key.caller.tenant, key.caller.namespace, key.caller.highest) == ("search", "public", Priority.BATCH)
    assert key.label == "nightly, ü"
    assert out.strip() not in err


def test_keys_are_appended_to_a_file_that_only_its_owner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    for tenant in ("search", "mail"):
        assert run("new", "--tenant", tenant, "--file", str(path)) == 0
    path.write_text(path.read_text().rstrip() + "\n# no newline at the end")
    assert run("new", "--tenant", "maps", "--file", str(path)) == 0
    drawn = capsys.readouterr().out.split()
    assert [key.digest for key in parse(path.read_bytes())] == [digest_of(each) for each in drawn]
    assert not any(each in path.read_text() for each in drawn)
    assert path.stat().st_mode & 0o777 == 0o600
    assert run("check", str(path)) == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()] == [
        ["TENANT", "NAMESPACE", "PRIORITY", "LABEL"],
        *([tenant, tenant, "standard", "-"] for tenant in ("search", "mail", "maps")),
    ]
    assert not any(digest_of(each).hex() in out for each in drawn)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["new"], "the following arguments are required: --tenant"),
        (["new", "--tenant", "a b"], "the entry: key 1 (line 1): tenant must be"),
        (["new", "--tenant", "a", "--namespace", "-"], "namespace must be"),
        (["new", "--tenant", "a", "--priority", "urgent"], "invalid choice: 'urgent'"),
        (["new", "--tennant", "a"], "the following arguments are required: --tenant"),
        (["check"], "the following arguments are required: file"),
        (["check", "/nowhere/keys.toml"], "/nowhere/keys.toml cannot be read: No such file or directory"),
        (["new", "--tenant", "a", "--file", "/nowhere/keys.toml"], "cannot write to /nowhere/keys.toml"),
        (["renew"], "invalid choice: 'renew'"),
        ([], "the following arguments are required: verb"),
    ],
)
def test_what_is_misused_is_refused_and_shows_no_key(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[0]


def test_a_file_that_is_not_sound_is_named_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[key]]\ntenant = 1\n")
    for argv in (["check", str(path)], ["new", "--tenant", "a", "--file", str(path)]):
        assert run(*argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"twostroke: {path}: key 1 (line 1): sha256 must be")
    assert path.read_text() == "[[key]]\ntenant = 1\n"
