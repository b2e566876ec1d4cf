"""Names: every key in Redis that this directory touches, and no other.

    PREFIX:FORMAT:nodes                 set: incarnations
    PREFIX:FORMAT:node:INCARNATION      string: the node's card
    PREFIX:FORMAT:blocks:INCARNATION    set: the keys of the node's blocks, and one marker

FORMAT is the digest of the KvFormat in hex, so that blocks of two formats never meet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """The names for one block format."""

    prefix: str
    format_digest: bytes

    @property
    def nodes(self) -> str:
        """All nodes."""
        return self._name("nodes")

    def node(self, incarnation: str) -> str:
        """A node's card."""
        return self._name(f"node:{incarnation}")

    def blocks(self, incarnation: str) -> str:
        """A node's set."""
        return self._name(f"blocks:{incarnation}")

    def anew(self, incarnation: str) -> str:
        """The set that is to take the place of the node's set."""
        return self._name(f"anew:{incarnation}")

    def _name(self, rest: str) -> str:
        return f"{self.prefix}:{self.format_digest.hex()}:{rest}"
