"""Proof: what a node signs when it leases blocks, and what its data plane demands before it sends a byte.

A proof is an HMAC-SHA256 (RFC 2104) under the key of one incarnation of the node, over every name that says whose
lease it is, each delimited by its length: no two leases share an encoding. It opens the blocks of that lease, at that
node, for as long as the lease lives; renewing a lease does not change it.
"""

from __future__ import annotations

import hmac
import secrets
import struct

PROOF_BYTES = 32
_NODE, _LEASE = b"twostroke.node", b"twostroke.lease"  # what is signed: neither can imitate the other


def node_key(incarnation: str, secret: bytes | None = None) -> bytes:
    """The key that a node signs with in this life: random, or derived from a secret that the cluster shares.

    Only who has the secret can derive it again, to sign or to verify in the node's stead.
    """
    return secrets.token_bytes(PROOF_BYTES) if secret is None else _mac(secret, _NODE, incarnation)


def sign(key: bytes, *, incarnation: str, lease_id: str, namespace: str) -> bytes:
    """The proof of a lease: PROOF_BYTES bytes."""
    return _mac(key, _LEASE, incarnation, lease_id, namespace)


def verify(key: bytes, proof: bytes, *, incarnation: str, lease_id: str, namespace: str) -> bool:
    """Whether the proof is that of this very lease; takes the same time wherever the two differ."""
    return hmac.compare_digest(proof, sign(key, incarnation=incarnation, lease_id=lease_id, namespace=namespace))


def _mac(key: bytes, what: bytes, *names: str) -> bytes:
    parts = [what, *(name.encode() for name in names)]
    return hmac.digest(key, b"".join(struct.pack("<I", len(part)) + part for part in parts), "sha256")
