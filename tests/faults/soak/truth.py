"""The truth about questions: what one engine alone answers, remembered where it will be needed again."""

from __future__ import annotations

from collections import OrderedDict

from tests.faults.soak.mix import RECURRING, Request
from tests.support.alone import Alone, Told


class Truth:
    """Computed once for each recurring question, so that it must be answered the same however often it is asked."""

    def __init__(self, alone: Alone) -> None:
        self._alone = alone
        self._known: OrderedDict[str, list[Told]] = OrderedDict()  # by all that was asked, written out

    async def of(self, request: Request) -> list[Told]:
        """Each choice, as it must be."""
        question = repr(request.question)
        if question not in self._known:
            told = await request.question.alone(self._alone)
            if not request.recurs:
                return told
            self._known[question] = told
            while len(self._known) > RECURRING:
                self._known.popitem(last=False)
        return self._known[question]
