"""What prepared files hold is the same from release to release, as long as their layout has the same version."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.support.backends import CPU
from tests.support.tiny import write_tiny
from twostroke.engine.loading.checkpoint import Checkpoint
from twostroke.engine.loading.draft import Draft, RecordedParts, needed_bytes
from twostroke.engine.loading.folder import folder_config
from twostroke.engine.loading.parts import CheckpointParts
from twostroke.engine.loading.prepared import LAYOUT_VERSION
from twostroke.engine.loading.shards import SafetensorsSource
from twostroke.engine.loading.shelf import WeightsCache
from twostroke.engine.matrix import WeightMode
from twostroke.engine.models.registry import FAMILIES

# Of all tensors of a prepared file. When one changes on purpose, raise LAYOUT_VERSION with it: files of the old version
# would be taken for good ones.
CONTENTS = {
    1: {
        WeightMode.F32: "9ec943dab9305803",
        WeightMode.F16: "96df5009bb7984f1",
        WeightMode.BF16: "fcc4d9476462a825",
        WeightMode.INT8: "2f9d6f7392170508",
    }
}


class Counted:
    """A source whose values are counted, not drawn: the same with every release of torch."""

    files: tuple[Path, ...] = ()

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        steps = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).add(len(name)) * 40_503 % 65_521
        return (steps.float() / 65_521 - 0.5).view(shape)


@pytest.mark.parametrize("mode", list(WeightMode))
def test_the_same_files_make_the_same_parts_until_the_layout_has_another_version(
    tmp_path: Path, mode: WeightMode
) -> None:
    folder = write_tiny(tmp_path / "model", family="qwen2", layers=1)
    config, source = folder_config(folder), Counted(SafetensorsSource(folder).shapes)
    cache = WeightsCache(folder=tmp_path / "weights")
    assert cache.is_usable()
    size, header_bytes = needed_bytes(source.shapes, mode)
    draft = cache.claim("m.safetensors", size=size, header_bytes=header_bytes)
    assert isinstance(draft, Draft)
    with closing(draft):
        FAMILIES[config.architecture](config, RecordedParts(CheckpointParts(Checkpoint(source), mode), draft), CPU)
        draft.publish()
    assert digest(cache.folder / "m.safetensors") == CONTENTS[LAYOUT_VERSION][mode]


def digest(path: Path) -> str:
    """Of all tensors by name, dtype and bytes; what only aligns others depends on the order they came in."""
    total = blake2b(digest_size=8)
    for name, tensor in sorted(safetensors.torch.load_file(path).items()):
        if not name.startswith("gap."):
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            total.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
