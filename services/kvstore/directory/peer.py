"""Peer: a node of the block store, as it introduces itself to the others."""

from __future__ import annotations

import json
from dataclasses import dataclass

MAX_CARD_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One life of a node."""

    incarnation: str
    address: str  # host:port of its gRPC door
    offers: tuple[tuple[str, str], ...] = ()  # (transport, where it is reached), preferred first
    started: float = 0.0  # Unix seconds, for people: never compared with a clock

    def card(self) -> bytes:
        """What the others are told."""
        return json.dumps({"address": self.address, "offers": self.offers, "started": self.started}).encode()

    @classmethod
    def from_card(cls, incarnation: str, card: bytes) -> Peer | None:
        """The peer behind a card; None for one that is not understood. Fields of later versions are ignored."""
        if len(card) > MAX_CARD_BYTES:
            return None
        try:
            told = json.loads(card)
            return cls(
                incarnation=incarnation,
                address=str(told["address"]),
                offers=tuple((str(transport), str(place)) for transport, place in told["offers"]),
                started=float(told["started"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class Holding:
    """How much of a prompt a peer holds."""

    peer: Peer
    blocks: int  # leading keys, at least 1
