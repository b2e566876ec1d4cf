"""Refusal: why a command does not even start, and what to do about it."""

from __future__ import annotations


class Refusal(Exception):
    """What was asked for cannot work as things are; nothing was started or changed."""

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(message)
        self.cure = cure
