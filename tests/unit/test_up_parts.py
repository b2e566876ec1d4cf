"""The parts of the launcher that need no process: back-off, logs, what the user reads."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from twostroke.launcher.backoff import MAX_QUICK_DEATHS, SETTLED_SECONDS, Backoff
from twostroke.launcher.journal import MAX_FILE_BYTES, Journal, Line
from twostroke.launcher.options import UpOptions
from twostroke.launcher.plan import Place, Site, plan
from twostroke.launcher.progress import TROUBLES_SHOWN, Progress
from twostroke.launcher.supervisor import child_environment

SITE = Site(
    model=Path("/models/tiny.gguf"),
    name="",
    arena_directory=Path("/dev/shm"),
    kvstore=Place.local(3),
    prefill=(Place.local(4),),
    decode=(Place.local(5),),
    router=Place.local(2, "0.0.0.0"),
    http_listen="0.0.0.0:1",
)


def record(event: str, level: str = "info", **fields: object) -> bytes:
    return json.dumps({"time": "t", "level": level, "service": "s", "event": event, **fields}).encode()


def test_pauses_double_and_five_quick_deaths_are_the_end() -> None:
    backoff = Backoff()
    pauses = [backoff.after(1.0, failed_start=False) for _ in range(MAX_QUICK_DEATHS)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, None]


def test_a_long_life_is_forgiven() -> None:
    backoff = Backoff()
    pauses = [backoff.after(life, failed_start=False) for life in (1.0, 1.0, SETTLED_SECONDS, 1.0)]
    assert pauses == [0.5, 1.0, 0.5, 1.0]


def test_what_never_started_is_tried_once_more() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0, failed_start=True) for _ in range(2)] == [0.5, None]


def test_a_log_record_is_read_and_anything_else_is_kept_as_text() -> None:
    line = Line.parse(record("serving", address="127.0.0.1:7").decode())
    assert (line.event, line.level, line.fields) == ("serving", "info", {"address": "127.0.0.1:7"})
    for text in ("Traceback (most recent call last):", "[1, 2]", '{"no": "event"}', "[" * 100_000):
        assert Line.parse(text) == Line(text, None, {})


def test_last_words_are_the_last_complaint_or_the_end_of_a_traceback(tmp_path: Path) -> None:
    with Journal(tmp_path / "log") as journal:
        assert journal.last_words().event == "nothing was logged"
        journal.add(record("stopped", "error", error="no such model"))
        journal.add(record("draining"))
        assert journal.last_words().fields["error"] == "no such model"
        journal.add(b"ImportError: no module named torch")
        assert str(journal.last_words()) == "ImportError: no module named torch"


def test_a_log_file_never_outgrows_its_limit_and_keeps_the_newest(tmp_path: Path) -> None:
    with Journal(tmp_path / "log") as journal:
        for at in range(20):
            journal.add(record(str(at), text="x" * (1 << 20)))
        sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sorted(sizes) == ["log", "log.1"]
    assert max(sizes.values()) <= MAX_FILE_BYTES
    assert json.loads((tmp_path / "log").read_bytes().splitlines()[-1])["event"] == "19"


def test_a_second_start_appends_to_the_log(tmp_path: Path) -> None:
    for _ in range(2):
        with Journal(tmp_path / "log") as journal:
            journal.add(b"line")
    assert (tmp_path / "log").read_bytes() == b"line\nline\n"


def progress(now: list[float] | None = None) -> tuple[Progress, io.StringIO, io.StringIO]:
    out, notes = io.StringIO(), io.StringIO()
    return Progress(out, notes, clock=lambda: now[0] if now else 0.0), out, notes


def test_the_ready_line_comes_once_and_says_where_and_how() -> None:
    user, out, notes = progress()
    user.ready(SITE, "f16")
    user.ready(SITE, "f16")
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("ready")] == [
        "ready http://127.0.0.1:1 (tiny, weights f16, 1 prefill, 1 decode, gRPC 127.0.0.1:2, 0.0 s)"
    ]
    assert "curl http://127.0.0.1:1/v1/chat/completions" in out.getvalue()
    assert notes.getvalue() == "twostroke: ready again\n"


def test_where_keys_are_asked_for_the_ready_lines_send_one() -> None:
    user, out, _ = progress()
    user.ready(replace(SITE, api_keys=Path("/keys.toml")), "f16")
    assert '-H "authorization: Bearer $TWOSTROKE_API_KEY"' in out.getvalue()
    assert 'api_key=os.environ["TWOSTROKE_API_KEY"])' in out.getvalue()


def test_each_child_that_serves_is_a_line_trouble_another_and_the_rest_stays_in_the_log() -> None:
    user, _, notes = progress()
    user.line("decode-1", Line("model ready", "info", {}))
    user.line("decode-1", Line("serving", "info", {"address": "127.0.0.1:5"}))
    user.ready(SITE, "f16")
    user.line("decode-1", Line("draining", "info", {}))
    user.line("decode-1", Line("store lookup failed", "warning", {"reason": "UNAVAILABLE"}))
    assert notes.getvalue().splitlines() == [
        "twostroke: decode-1 serves at 127.0.0.1:5 (0.0 s)",
        "twostroke: decode-1: warning: store lookup failed (reason UNAVAILABLE)",
    ]


def test_a_long_start_says_what_it_waits_for() -> None:
    now = [0.0]
    user, _, notes = progress(now)
    user.starting(["prefill-1", "router"], SITE, Path("/logs"))
    user.line("router", Line("not ready", "info", {"reason": "no decode worker is available"}))
    user.line("router", Line("serving", "info", {"address": "127.0.0.1:2"}))
    now[0] = 10.0
    user.waiting()
    user.line("prefill-1", Line("serving", "info", {"address": "127.0.0.1:4"}))
    now[0] = 20.0
    user.waiting()
    assert [line for line in notes.getvalue().splitlines() if "serves" not in line] == [
        "twostroke: starting 2 processes for tiny; logs in /logs",
        "twostroke: waiting for prefill-1 (10 s)",
        "twostroke: waiting for the router: no decode worker is available (20 s)",
    ]


def test_a_child_that_complains_without_end_cannot_flood_the_terminal() -> None:
    now = [0.0]
    user, _, notes = progress(now)
    for _ in range(1_000):
        user.line("decode-1", Line("again", "warning", {}))
    assert len(notes.getvalue().splitlines()) == TROUBLES_SHOWN + 1
    now[0] = 60.0
    user.line("decode-1", Line("later", "warning", {}))
    assert notes.getvalue().splitlines()[-1] == "twostroke: decode-1: warning: later"


class ClosedTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_terminal_does_not_end_the_cluster() -> None:
    user = Progress(ClosedTerminal(), ClosedTerminal())
    user.note("hello")
    user.ready(SITE, "f16")


def test_children_get_our_environment_without_our_settings() -> None:
    ours = {
        "HOME": "/h",
        "TWOSTROKE_PREFILL": "2",
        "TWOSTROKE_CACHE": "/c",
        "TWOSTROKE_API_KEY": "k",
        "OMP_NUM_THREADS": "64",
    }
    environ = child_environment(ours)
    assert environ["HOME"] == "/h"
    assert environ["OMP_NUM_THREADS"] == "1"
    assert [name for name in environ if name.startswith("TWOSTROKE_")] == ["TWOSTROKE_CACHE"]


@pytest.mark.parametrize("line", [Line("a", None, {}), Line("a", "info", {})])
def test_a_line_without_fields_is_its_event(line: Line) -> None:
    assert str(line) == "a"


def test_the_store_is_told_of_a_disk_where_one_is_named(tmp_path: Path) -> None:
    for options, told in ((UpOptions(), False), (UpOptions(disk_directory=tmp_path, disk_bytes="2GiB"), True)):
        store = plan(options, SITE)[0].arguments
        assert ("--disk-directory" in store) is told
        assert (str(2 << 30) in store) is told


def test_everything_but_the_router_can_be_struck_where_that_is_asked_for() -> None:
    told = {spec.name for spec in plan(UpOptions(fault_points=True), SITE) if "--fault-points" in spec.arguments}
    assert told == {spec.name for spec in plan(UpOptions(), SITE)} - {"router"}
    assert not any("--fault-points" in spec.arguments for spec in plan(UpOptions(), SITE))
