"""What a call may change of what others hold at a node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from services.kvstore.gathering import Need
from services.kvstore.settings import DiskSettings
from tests.support.neighbors import held, host, released, written
from tests.support.storecalls import refusal, whole
from tests.support.stores import eventually, keys, pages, worker
from twostroke import wire
from twostroke.errors import InvalidRequest
from twostroke.kv.refs import Terms
from twostroke.v1 import kvstore_pb2 as pb


async def test_promotion_leaves_transient_blocks_to_their_leases(tmp_path: Path) -> None:
    disk = DiskSettings(disk_directory=tmp_path / "disk", disk_bytes=4 << 20)
    async with host(tmp_path, "a", disk=disk) as a:
        await released(a, (await written(a, 1)).lease)
        await eventually(lambda: a.blocks.reachable(keys(1)) == 1 and a.node.disk_stats()[0].written == 1)  # type: ignore[index]
        for start in (100, 200):
            await released(a, (await written(a, *range(start, start + 16))).lease)
        assert held(a, [1]) == 0
        hidden = (await written(a, 2, terms=Terms(transient=True))).lease
        supply = a.node.supply(a.node.incarnation)
        assert len(await supply.acquire(a.blocks.lease(hidden.id, 5.0), Need(keys=keys(1, 2)))) == 2
        assert held(a, [2]) == 0


async def test_a_stream_that_fails_leaves_a_lease_alone_that_was_open(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, worker(a, pages(1)) as client:
        lease = a.blocks.lease("2" * 32, 5.0, opens=True)
        first = pb.WriteRequest(
            incarnation=a.node.incarnation, lease_id=lease.id, lease_duration=wire.duration_pb(5.0), opens=True
        )

        async def requests() -> AsyncIterator[pb.WriteRequest]:
            yield first
            yield whole(1, b"short")

        await refusal(InvalidRequest, client.stub.Write(requests(), timeout=5))
        assert a.blocks.renew([lease.id], 1.0) == [lease.id]
