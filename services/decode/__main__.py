"""The decode service as a process: what it was told, what it runs, how it ended."""

from __future__ import annotations

import uvloop

from services.decode.settings import DecodeSettings
from twostroke.heap import keep_freed_memory
from twostroke.rpc.process import exit_code, importing
from twostroke.settings import load_or_exit


def main() -> int:
    """Run the service; answers the exit code of the process."""
    settings = load_or_exit(DecodeSettings, prog="twostroke-decode")
    with importing():
        from services.decode.assembly import run
    keep_freed_memory()
    return exit_code(lambda: uvloop.run(run(settings)))


if __name__ == "__main__":
    raise SystemExit(main())
