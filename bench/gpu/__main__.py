"""Runs the stages, each in a process of its own, and prints one table: `python -m bench.gpu --out FOLDER`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bench.gpu.findings import Finding, read
from bench.gpu.stages import STAGES, Stage
from bench.gpu.toolchain import compiler_environment

_END_SECONDS = 10.0  # that a stage gets to end in after its limit
_LIMIT_SECONDS = 575.0  # of all stages: what is begun later would not end in time


def main() -> int:
    """Run everything; the exit status says whether every bound was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for results and logs; by default a temporary one")
    parser.add_argument("--only", default="", help="names of stages, separated by commas")
    parser.add_argument("--emulate", action="store_true", help="rehearse on a CPU with small sizes: proves nothing")
    told = parser.parse_args()
    folder = told.out or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in STAGES if not told.only or stage.name in told.only.split(",")]
    environ = os.environ | ({} if told.emulate else compiler_environment(folder / "link"))
    began, all_held = time.monotonic(), True
    for stage in chosen:
        left = _LIMIT_SECONDS - (time.monotonic() - began)
        all_held &= run_stage(stage, folder, environ, left=left, emulate=told.emulate)
    results = {stage.name: [asdict(each) for each in read(folder / f"{stage.name}.json")] for stage in chosen}
    (folder / "results.json").write_text(json.dumps({"emulated": told.emulate, "stages": results}, indent=1))
    kind = "rehearsal on a CPU, no GPU was used" if told.emulate else "GPU check"
    print(f"\n{kind}: {'every bound held' if all_held else 'NOT every bound held'}; {folder / 'results.json'}")
    return 0 if all_held else 1


def run_stage(stage: Stage, folder: Path, environ: Mapping[str, str], *, left: float, emulate: bool) -> bool:
    """Run a stage to its end or its limit; says whether it ended well and every bound held."""
    print(f"\n== {stage.name}: {stage.about} (at most {stage.seconds} s)", flush=True)
    if left < stage.seconds / 2:
        print("   left out: the time of all stages is nearly up")
        return False
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.gpu.stage", stage.name, "--out", str(folder)]
    process = subprocess.Popen(
        [*command, *(["--emulate"] if emulate else [])], env=dict(environ), start_new_session=True
    )
    try:
        status: int | None = process.wait(min(stage.seconds, left))
    except subprocess.TimeoutExpired:
        status = None
        process.send_signal(signal.SIGINT)  # it takes apart what it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    missed = [each for each in read(folder / f"{stage.name}.json") if each.holds is False]
    ended = {0: "done", None: "ENDED AT ITS LIMIT"}.get(status, f"FAILED with status {status}")
    print(f"   {ended} after {time.monotonic() - began:.0f} s, {_count(missed)} missed", flush=True)
    return status == 0 and not missed


def _count(missed: list[Finding]) -> str:
    return f"{len(missed)} bound{'s' if len(missed) != 1 else ''}"


if __name__ == "__main__":
    raise SystemExit(main())
