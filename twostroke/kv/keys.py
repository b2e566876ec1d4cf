"""Block keys: what a block of keys and values was computed from, in 16 bytes.

A key is a BLAKE2b digest chained over (parent key, tokens of the block), so equal keys mean an equal whole prefix. The
chain starts at a root that binds the format of the bytes and the namespace of the tenant, each tagged by type and
delimited by length: no two different inputs share an encoding. Golden vectors in the tests hold the encoding still.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from twostroke.types import CachePolicy, RequestContext

KEY_BYTES = 16
HASH_SCHEME = "blake2b-128-chain/v1"

_ROOT = b"twostroke.root"  # `person` separates roots from blocks: neither can imitate the other
_BLOCK = b"twostroke.block"


def root_key(format_digest: bytes, namespace: str, salt: str = "") -> bytes:
    """The parent of a sequence's first block.

    Args:
        format_digest: 16 bytes, `KvFormat.digest`.
        namespace: sharing domain of the authenticated tenant.
        salt: chosen by the caller; it can only narrow the namespace.
    """
    digest = blake2b(digest_size=KEY_BYTES, person=_ROOT)
    for tag, value in ((b"f", format_digest), (b"n", namespace.encode()), (b"s", salt.encode())):
        digest.update(tag + struct.pack("<I", len(value)) + value)
    return digest.digest()


def request_root(format_digest: bytes, context: RequestContext) -> bytes:
    """The parent of a request's first block; one that bypasses the cache gets a root that no other request has."""
    if context.cache_policy is CachePolicy.BYPASS:
        return root_key(format_digest, context.namespace, f"request:{context.request_id}")
    return root_key(format_digest, context.namespace, f"salt:{context.salt}" if context.salt else "")


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that holds `tokens` (full or a partial tail) after the prefix named by `parent`."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return blake2b(parent + packed, digest_size=KEY_BYTES, person=_BLOCK).digest()


def block_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of all full blocks of `tokens`, in order; the partial tail has no key here."""
    keys, parent = [], root
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        parent = block_key(parent, tokens[end - block_tokens : end])
        keys.append(parent)
    return keys
