"""`twostroke up`: check, start everything, say ready, keep it running, take it apart."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from twostroke.cli.terminal import complain, show
from twostroke.launcher.child import GaveUp
from twostroke.launcher.options import UpOptions
from twostroke.launcher.plan import plan
from twostroke.launcher.preflight import state_directory, survey
from twostroke.launcher.progress import Progress
from twostroke.launcher.supervisor import Supervisor, child_environment
from twostroke.settings import load


def run(argv: Sequence[str]) -> int:
    """Run the verb. Raises Refusal before anything was started."""
    options = load(UpOptions, prog="twostroke up", argv=argv, environ=os.environ)
    site = survey(options)
    specs = plan(options, site)
    if options.check:
        show("\n".join(shlex.join(["python", *spec.command]) for spec in specs))
        return 0
    logs = state_directory(options, site)
    command = "twostroke" if shutil.which("twostroke") else f"{sys.executable} -m twostroke"
    supervisor = Supervisor(options, site, logs, Progress(sys.stdout, sys.stderr, command=command))
    try:
        return asyncio.run(supervisor.run(specs, child_environment(os.environ)))
    except GaveUp as failure:
        complain(str(failure), failure.cure)
        return 2 if failure.misused else 1
