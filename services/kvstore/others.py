"""Others: the nodes of other hosts, as this one knows them: from tickets, and from the directory if there is one."""

from __future__ import annotations

from services.kvstore.blocks import Blocks
from services.kvstore.directory.directory import Directory
from services.kvstore.directory.peer import Peer
from services.kvstore.directory.settings import DirectorySettings
from services.kvstore.fetching import Fetching
from services.kvstore.gathering import Gathering
from services.kvstore.neighbors import Neighbors
from services.kvstore.settings import PeerSettings
from twostroke.kv.format import KvFormat
from twostroke.kv.refs import Offer
from twostroke.kv.transport import peer_streams, tcp
from twostroke.kv.transport.peer import Peers
from twostroke.kv.transport.peer_streams import StreamPeer
from twostroke.kv.transport.tcp import TcpLimits, TcpTransport

WAY_SHARE = 1 / 3  # of a fetch's time that one way may take for a block: there is time for the next one


class Others:
    """What a node needs to read from others, and to be found by them. It begins when the block format is known."""

    def __init__(self, peers: PeerSettings | None = None, directory: DirectorySettings | None = None) -> None:
        self.directory: Directory | None = None
        self.gathering: Gathering | None = None
        self._settings = peers or PeerSettings()
        self._told = directory or DirectorySettings()
        self._link = Directory.link(self._told) if self._told.redis_url else None

    def join(self, me: Peer, kv_format: KvFormat) -> Directory | None:
        """Keep this node's entries in the directory from now on; answers it, where there is one."""
        if self._link:
            self.directory = Directory.started(self._told, me, kv_format.digest, self._link)
        return self.directory

    def serve(self, blocks: Blocks, kv_format: KvFormat) -> Gathering:
        """Bring what others hold into these blocks' arena."""
        neighbors = Neighbors(kv_format, self._settings.peer_nodes)
        ways = Peers({tcp.KIND: self._tcp, peer_streams.KIND: self._streams}, most=2 * self._settings.peer_nodes)
        self.gathering = Gathering(blocks, Fetching(blocks, neighbors, ways), self.directory, self._settings)
        return self.gathering

    async def close(self) -> None:
        """Leave the directory and break off what is under way; the arena is still open."""
        if self.directory:
            await self.directory.close()
        if self.gathering:
            await self.gathering.close()

    def _tcp(self, offer: Offer) -> TcpTransport:
        seconds = WAY_SHARE * self._settings.peer_seconds
        limits = TcpLimits(
            connections=self._settings.peer_connections,
            waiting=self._settings.peer_fetches,
            connect_seconds=seconds,
            block_seconds=seconds,
        )
        return TcpTransport(offer, limits)

    def _streams(self, offer: Offer) -> StreamPeer:
        return StreamPeer(offer, piece_seconds=WAY_SHARE * self._settings.peer_seconds)
