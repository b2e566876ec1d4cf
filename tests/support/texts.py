"""A fixed corpus of awkward texts, for comparing tokenizers."""

from __future__ import annotations

from random import Random

_PIECES = (
    *("Hello", " world", "the ", " quick", "brown ", "It's", " we'll", "I'VE", "don't ", " tokenization", "xyzzy"),
    *(" ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\t\t", "\r\n", "\u00a0", "\u3000", "\u200b", " \u2028"),
    *("0", "7", "42", " 1234", "3.14159", "1,000,000", "   12", "\u0663\u0664", "\u00b2", "\u2167", "\uff11\uff12"),
    *("\U0001f600", "\U0001f469\u200d\U0001f680", "\U0001f1eb\U0001f1f7", "\u2764\ufe0f", "\U0001f44d\U0001f3fd"),
    *(
        "\u4f60\u597d",
        "\u4e16\u754c\u3002",
        "\u3053\u3093\u306b\u3061\u306f",
        "\uc548\ub155",
        "\u0928\u092e\u0938\u094d",
    ),
    *("caf\u00e9", "cafe\u0301", "\u00fcber", "\u0160koda", "\u03b1\u03b2\u03b3", "\u0414\u043e\u043c", "\u05e9\u05dc"),
    *("def f(x):\n    return x**2", "if (a && b) {", "}\n", '<div class="a">', "</div>", "#include <stdio.h>", "a_b-c"),
    *(
        "SELECT * FROM t;",
        "\\n\\t",
        "/* ... */",
        "::",
        "->",
        "==",
        "!!!",
        "...",
        "\u2026",
        "\u201cquoted\u201d",
        "\u2014",
    ),
    *("http://example.com/?q=1&r=2", "user@example.com", "$100", "50%", "#1", "[0]", "{'k': 'v'}", "C:\\path", "@@"),
    *("\x00", "\x07", "\ufffd", "\ufeff", "\ue000", "\U000f0041", "\U0010fffd", "\u0301", "\u200d"),
)
_CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<|", "|>", "<file_sep>", "<repo_name>")


def corpus(count: int = 1_200, *, controls: tuple[str, ...] = _CONTROLS) -> list[str]:
    """`count` texts: each piece alone first, then random joins; a third of those hold names of control tokens."""
    random = Random(20_260_101)
    texts = [*_PIECES, *controls]
    while len(texts) < count:
        pieces = (*_PIECES, *controls * 4) if len(texts) % 3 == 0 else _PIECES
        texts.append("".join(random.choices(pieces, k=random.randint(2, 24))))
    return texts[:count]
