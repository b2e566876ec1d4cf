"""docs/handoff.md, written from the table of stages: `make docs`."""

from __future__ import annotations

import sys

from twostroke.routing.stages import MEANING, RULES, Stage

_HEAD = """# The handoff, stage by stage

Written from `twostroke/routing/stages.py` by `make docs`. Each choice of a request is in one stage; the router moves it
when something happens. `/metrics` counts choices by stage (`twostroke_handoff_choices`), what happened to them
(`twostroke_handoff_events`) and how long it took (`twostroke_handoff_seconds`).
"""
_HOLDS = {
    Stage.QUEUED: "nobody works on it; nothing is held but room at the router",
    Stage.COMPUTING: "prefill runs the prompt and publishes full blocks under its lease; decode loads them ahead",
    Stage.PUBLISHED: "the router holds the ticket, if there is one, and renews its lease; prefill holds nothing",
    Stage.LOADING: "a decode worker brings the blocks into its pages; the router still renews the lease",
    Stage.OWNED: "a decode worker's pages hold everything; the lease is released",
    Stage.DONE: "nobody holds anything; the usage record is written, once",
}


def render() -> str:
    """The page in Markdown."""
    stages = "\n".join(f"| **{stage.value}** | {_HOLDS[stage]} |" for stage in Stage)
    events = "\n".join(f"| {event.value} | {meaning} |" for event, meaning in MEANING.items())
    return "\n".join(
        [
            _HEAD,
            f"| stage | who holds what |\n|---|---|\n{stages}\n",
            *(_section(stage) for stage in Stage if RULES[stage]),
            f"## What the events mean\n\n| event | meaning |\n|---|---|\n{events}\n",
        ]
    )


def _section(stage: Stage) -> str:
    rules = "\n".join(f"| {event.value} | {rule.to.value} | {rule.then} |" for event, rule in RULES[stage].items())
    return f"## {stage.value.capitalize()}\n\n| event | next | what is done |\n|---|---|---|\n{rules}\n"


if __name__ == "__main__":
    sys.stdout.write(render())
