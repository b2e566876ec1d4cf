"""The `twostroke` command: a few verbs, data on standard output, everything else on standard error.

Exit status: 0 done, 1 failed, 2 misused, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from twostroke import __version__
from twostroke.cli.terminal import complain, show
from twostroke.errors import TwostrokeError
from twostroke.launcher.refusal import Refusal
from twostroke.settings import unknown_name

# Each verb is a module of this package with `run(argv) -> int`, imported only when it is asked for.
VERBS = {
    "up": "start a whole cluster on this machine",
    "chat": "talk with the model, or ask it one question",
    "generate": "continue a text",
    "status": "say how a cluster is",
    "models": "list what a cluster serves; export a model's tokenizer",
    "keys": "make API keys; check a file of them",
    "eval": "measure what weight modes cost in quality, on a text",
    "warmup": "build ahead what a first start would wait for",
    "probe": "exit 0 when a service is healthy; for container health checks",
}
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; answers the exit status."""
    verb, *rest = (sys.argv[1:] if argv is None else argv) or ("--help",)
    if verb in ("-h", "--help"):
        show(usage())
        return 0
    if verb == "--version":
        show(__version__)
        return 0
    if verb not in VERBS:
        complain(unknown_name("command", verb, list(VERBS)))
        return MISUSED
    try:
        status: int = importlib.import_module(f"twostroke.cli.{verb}").run(rest)
    except Refusal as refusal:
        complain(str(refusal), refusal.cure)
        return MISUSED
    except TwostrokeError as error:
        complain(str(error), error.cure)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None
        return 0
    return status


def usage() -> str:
    """What the command can do, a line a verb."""
    verbs = "\n".join(f"  {verb:<10} {about}" for verb, about in VERBS.items())
    return f"usage: twostroke COMMAND [OPTIONS]\n\n{verbs}\n\n`twostroke COMMAND --help` lists the options of one."
