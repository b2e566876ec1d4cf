"""The pages that hold attention keys and values: one tensor, block-major, the same bytes on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.engine.cuda.pages import CudaCopyStream, StagedPages
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.engine.native.memory import back_now, zeros_in_huge_pages
from twostroke.errors import Internal
from twostroke.kv.format import KvFormat
from twostroke.kv.transport.pages import HostPages, Pages
from twostroke.settings import InvalidSetting

CPU = torch.device("cpu")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # names as in KvFormat
_MODES = {KvMode.F32: "float32", KvMode.BF16: "bfloat16", KvMode.F16: "float16"}


class KvCache:
    """Pages of keys and values, by page number. Who owns which page is the block pool's business, not this class's.

    Page 0 is scratch: the pool never gives it out, and only padded rows read it. On a CPU nothing writes it, so it
    stays zero; captured steps on a GPU write the keys and values of their padded rows there.

    Attributes:
        format: shape and dtype of a page.
        pages: how many there are, the scratch page included.
        device: whose memory they are.
        data: [pages, layers, 2 (key, value), block_tokens, kv_heads, head_dim].
    """

    def __init__(
        self,
        format: KvFormat,  # noqa: A002 - the domain's word
        pages: int,
        device: torch.device = CPU,
    ) -> None:
        if pages < 2:
            raise Internal(f"a cache of {pages} pages has no room beside the scratch page")
        self.format = format
        self.pages = pages
        self.device = device
        with self._memory_or_internal():
            memory = _zeros(pages * format.block_bytes, device)
        self.data = memory.view(_DTYPES[format.dtype]).view(pages, *format.block_shape)

    async def take_memory(self) -> None:
        """Have all pages backed by the host's memory before they are needed; the event loop goes on.

        Raises:
            Internal: it has no room for them.
        """
        if self.device.type != "cpu":
            return
        with self._memory_or_internal():
            await back_now(self.data.view(-1).view(torch.uint8))

    def token_rows(self) -> Tensor:
        """Return the same memory with one row a token: [pages * layers * 2 * block_tokens, kv_heads, head_dim]."""
        return self.data.view(-1, self.format.kv_heads, self.format.head_dim)

    def rows(self) -> npt.NDArray[np.uint8]:
        """Return the same memory as bytes, one row a page: uint8 [pages, block_bytes]. It must be the host's."""
        return self.data.view(self.pages, -1).view(torch.uint8).numpy()

    def movable(self) -> Pages:
        """Return the same memory as transports move it; each call takes staging memory of its own on a device."""
        if self.device.type == "cpu":
            return HostPages(self.rows())
        return StagedPages(self.data, CudaCopyStream(self.device))

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's bytes over another's (copy-on-write of a shared tail)."""
        self.data[target].copy_(self.data[source])

    @contextmanager
    def _memory_or_internal(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            size = self.pages * self.format.block_bytes
            raise Internal(
                f"no memory for {size} bytes of keys and values ({error}); ask for fewer kv bytes"
            ) from error


def kv_dtype(kv: KvMode, weights: WeightMode, activations: torch.dtype) -> str:
    """Name, as KvFormat does, what keys and values are kept in.

    Raises:
        InvalidSetting: activations have 16 bits, and the kernels for these attend over nothing else.
        Internal: activations are of a dtype that no cache has.
    """
    if activations != torch.float32:
        own = next((name for name, dtype in _DTYPES.items() if dtype == activations), None)
        if own is None:
            raise Internal(f"no cache is kept in {activations}")
        if _MODES.get(kv, own) != own:
            raise InvalidSetting("kv_dtype", kv, f"beside activations in {own} keys and values are in {own} too")
        return own
    return _MODES[_beside(weights) if kv is KvMode.AUTO else kv]


def _beside(weights: WeightMode) -> KvMode:
    return KvMode.F32 if weights is WeightMode.F32 else KvMode.F16


def _zeros(size: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return zeros_in_huge_pages(size)
