"""One stage in this process: `python -m bench.gpu.stage NAME --out FOLDER`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bench.gpu.findings import Notes
from bench.gpu.ground import Ground
from bench.gpu.stages import STAGES


def main() -> None:
    """Run it; findings are in FOLDER/NAME.json, whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[stage.name for stage in STAGES])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--emulate", action="store_true")
    told = parser.parse_args()
    notes = Notes(told.out / f"{told.name}.json")
    with notes.part(told.name):
        ground = Ground(emulated=told.emulate, folder=told.out, notes=notes)
        importlib.import_module(f"bench.gpu.{told.name}").run(ground)


if __name__ == "__main__":
    main()
