"""A text as a model reads it to be measured: windows to score, and prompts to continue. Token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Passages:
    """Parts of one text. Each begins with the beginning-of-sequence token where the model wants one."""

    windows: tuple[tuple[int, ...], ...]  # cover the text; each is read from nothing, and all but its first are scored
    prompts: tuple[tuple[int, ...], ...]  # equally long, spread evenly over the text

    @property
    def tokens(self) -> int:
        """How many tokens are read."""
        return sum(map(len, self.windows))


def cut(text: Sequence[int], *, bos: int | None, window: int, prompts: int, prompt_tokens: int) -> Passages:
    """Cut `text` into windows of at most `window` tokens and up to `prompts` prompts of `prompt_tokens` of the text.

    Args:
        text: token ids, without a beginning-of-sequence token.
        bos: the beginning-of-sequence token to put before each part; None for a model without.
        window: at least 2; a rest of which no token would be scored is left out.
        prompts: how many there may be.
        prompt_tokens: length of each.

    Raises:
        InvalidRequest: the text is too short for one prompt and a token to score.
    """
    if len(text) <= prompt_tokens:
        raise InvalidRequest(f"the text has {len(text)} tokens; at least {prompt_tokens + 1} are needed", field="text")
    lead = () if bos is None else (bos,)
    size = window - len(lead)
    windows = [(*lead, *text[start : start + size]) for start in range(0, len(text), size)]
    step = max(1, (len(text) - prompt_tokens) // prompts)
    starts = range(0, len(text) - prompt_tokens, step)[:prompts]
    return Passages(
        windows=tuple(each for each in windows if len(each) > 1),
        prompts=tuple((*lead, *text[start : start + prompt_tokens]) for start in starts),
    )
