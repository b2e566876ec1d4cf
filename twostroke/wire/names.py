"""Names of blocks and leases, checked before any work."""

from __future__ import annotations

import re
from collections.abc import Sequence

from twostroke.errors import InvalidRequest
from twostroke.kv.keys import KEY_BYTES
from twostroke.kv.refs import Lease
from twostroke.v1 import common_pb2
from twostroke.wire import common

_LEASE_ID = re.compile(r"[0-9a-f]{32}")


def check_lease_id(lease_id: str) -> str:
    """Refuse what cannot name a lease; answers it."""
    if not _LEASE_ID.fullmatch(lease_id):
        raise InvalidRequest("lease_id must be 32 hexadecimal digits", field="lease_id")
    return lease_id


def check_keys(keys: Sequence[bytes], limit: int, *, field: str = "keys") -> None:
    """Raise InvalidRequest unless there are at most `limit` keys of 16 bytes."""
    if len(keys) > limit:
        raise InvalidRequest(f"{field}: at most {limit} keys in one call", field=field)
    if any(len(key) != KEY_BYTES for key in keys):
        raise InvalidRequest(f"{field}: a key has {KEY_BYTES} bytes", field=field)


def lease(message: common_pb2.Lease) -> Lease:
    """Read a lease."""
    return Lease(
        id=message.id,
        seconds=common.seconds(message.duration),
        incarnation=message.store_incarnation,
        address=message.store_address,
    )


def lease_pb(value: Lease) -> common_pb2.Lease:
    """Write a lease."""
    return common_pb2.Lease(
        id=value.id,
        duration=common.duration_pb(value.seconds),
        store_incarnation=value.incarnation,
        store_address=value.address,
    )
