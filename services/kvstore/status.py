"""What a node says of itself, as the contract has it."""

from __future__ import annotations

import dataclasses

from services.kvstore.directory.breaker import State
from services.kvstore.directory.directory import DirectoryStats
from services.kvstore.node import Node
from services.kvstore.spool import SpoolStats
from services.kvstore.supply import Supply
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.wire import kv_format_pb


def status_pb(node: Node) -> pb.GetStoreStatusResponse:
    """Write how full a node is, and what has happened; the counts of slots have the same names in both."""
    disk, directory = node.disk_stats(), node.others.directory
    cut = node.format is not None
    return pb.GetStoreStatusResponse(
        incarnation=node.incarnation,
        format=kv_format_pb(node.format) if node.format else None,
        disk=_disk_pb(*disk) if disk else None,
        peers=_peers_pb(node.supply(node.incarnation)) if cut else None,
        directory=_directory_pb(directory.stats()) if directory else None,
        **dataclasses.asdict(node.stats()),
    )


def _disk_pb(spool: SpoolStats, promoted: int) -> pb.DiskStatus:
    return pb.DiskStatus(
        on=spool.tier.on,
        slots=spool.tier.slots,
        blocks=spool.tier.blocks,
        waiting=spool.waiting,
        failures=spool.tier.failures,
        damaged=spool.tier.damaged,
        written=spool.written,
        promoted=promoted,
        dropped=spool.dropped + spool.evicted + spool.refused,
    )


def _peers_pb(supply: Supply) -> pb.PeerStatus:
    gathering, fetching = supply.gathering, supply.gathering.fetching
    return pb.PeerStatus(
        fetching=gathering.under_way,
        nodes=len(fetching.neighbors),
        fetched=fetching.stats.blocks,
        fetched_bytes=fetching.stats.bytes,
        fetched_over=fetching.ways.moved,
        misses=fetching.stats.misses,
        failures=fetching.neighbors.failures,
        refused=gathering.refused,
        granted=supply.granted,
    )


def _directory_pb(stats: DirectoryStats) -> pb.DirectoryStatus:
    return pb.DirectoryStatus(
        up=stats.state is State.UP,
        nodes=stats.peers,
        held=stats.held,
        waiting=stats.waiting,
        lookups=stats.lookups,
        unasked=stats.unasked,
        failures=stats.failures,
        writes=stats.writes,
        rewrites=stats.rewrites,
        overflows=stats.overflows,
    )
