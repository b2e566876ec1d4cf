"""Counter-based noise: which random number a token gets depends on what it is, never on when it is drawn.

SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", OOPSLA, the finalizer with
Stafford's mix13 constants; Vigna's public domain `splitmix64.c`). A stream is keyed by (seed, choice, position) and
token `id` takes the stream's output number `id`, so batch mates, preemption and hand-off cannot change a draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def stream_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit state of one draw's stream: SplitMix64 folded over the three words.

    Args:
        seed: of the request, unsigned 64 bits.
        choice: which of the request's answers.
        position: of the drawn token in the whole sequence, the prompt included.
    """
    key = 0
    for word in (seed, choice, position):
        key = _mixed((key + word + _GAMMA) & _WORD)
    return key


def stream_words(keys: Sequence[int], device: torch.device) -> Tensor:
    """Keys of many streams as the functions below take them: int64 [n], the same 64 bits."""
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)


def token_bits(keys: Tensor | int, ids: Tensor) -> Tensor:
    """Output number `id` of the stream, for each id: int64 holding 64 random bits.

    Args:
        keys: one stream's for all ids, or the words of many, which broadcast against the ids.
        ids: token ids, int64.
    """
    state = _scrambled(steps(ids) + (keys if isinstance(keys, Tensor) else _signed(keys)))
    return state.bitwise_xor_(_shifted(state, _LAST_SHIFT))


def gumbel(keys: Tensor | int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each token id: float64; arguments as for `token_bits`.

    The upper 52 bits become a uniform number strictly between 0 and 1, each step's centre, so both logarithms are
    finite. The argmax of logits plus this noise is distributed as their softmax (Maddison et al. 2014,
    arXiv:1411.0030).
    """
    uniform = _shifted(token_bits(keys, ids), 12).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def steps(ids: Tensor) -> Tensor:
    """How far each id's state lies from its stream's key, whichever that is: int64."""
    return (ids + 1).mul_(_signed(_GAMMA))


def exceedance(keys: Tensor, steps: Tensor) -> Tensor:
    """A lower bound on 1 - u, the chance that a token's noise is exceeded: float32, rounding and all within 2**-24.

    Of the upper half of all u it is the chance itself, less 2**-30, for a fraction of the price of the noise: without
    logarithms, and without the hash's last shift, which changes none of the upper 31 bits. Of the lower half it is u.

    Args:
        keys: words of streams, int64.
        steps: those of the token ids; they broadcast against the keys.
    """
    state = _scrambled(steps + keys)
    # Read with its sign, the word is u in the lower half and u - 1 in the upper.
    return state.to(torch.float32).mul_(2.0**-64).abs_().sub_(2.0**-30)


def _scrambled(state: Tensor) -> Tensor:
    """The hash without its last shift, in place; int64 arithmetic wraps modulo 2**64."""
    for shift, factor in _MIX:
        state.bitwise_xor_(_shifted(state, shift)).mul_(_signed(factor))
    return state


def _mixed(state: int) -> int:
    for shift, factor in _MIX:
        state = ((state ^ (state >> shift)) * factor) & _WORD
    return state ^ (state >> _LAST_SHIFT)


def _shifted(state: Tensor, count: int) -> Tensor:
    """A logical right shift; torch's own keeps the sign."""
    return (state >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """The same 64 bits read as two's complement, which is what int64 tensors take."""
    return word - (1 << 64) if word >> 63 else word
