"""Pages that are staged, through both transports: the same blocks as from pages in host memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.staged import HostStream
from tests.support.stores import KV_FORMAT, keys, named, pages, serving_store
from twostroke.engine.cuda import pages as staged
from twostroke.engine.cuda.pages import StagedPages
from twostroke.kv.blocks import BlockStoreClient, TransportChoice
from twostroke.kv.transport.pages import HostPages

both = pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])
BLOCKS = 11  # more than a stage or a message's worth


@both
async def test_blocks_of_a_device_are_those_of_a_host(
    tmp_path: Path, transport: TransportChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "_STAGE_BYTES", 3 * KV_FORMAT.block_bytes)
    ours, theirs = pages(BLOCKS + 1), np.zeros((BLOCKS + 1, KV_FORMAT.block_bytes), dtype=np.uint8)
    back = torch.zeros((BLOCKS + 1, KV_FORMAT.block_bytes), dtype=torch.uint8)
    device = StagedPages(torch.from_numpy(ours), HostStream())
    names, numbers = range(1, BLOCKS + 1), list(range(BLOCKS, 0, -1))
    async with serving_store(tmp_path) as store:
        for target in (HostPages(theirs), StagedPages(back, HostStream())):
            async with (
                BlockStoreClient.opened(store.address, KV_FORMAT, device, transport=transport) as writer,
                BlockStoreClient.opened(store.address, KV_FORMAT, target, transport=transport) as reader,
            ):
                assert len((await writer.write_blocks(None, named(*names), numbers)).refs) == BLOCKS
                assert (await reader.read_blocks(None, keys(*names), numbers)).blocks == BLOCKS
    assert np.array_equal(theirs[1:], ours[1:])
    assert np.array_equal(back.numpy()[1:], ours[1:])
