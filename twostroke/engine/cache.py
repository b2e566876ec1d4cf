"""The pages that hold attention keys and values: one tensor, block-major, the same bytes on every device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.errors import Internal
from twostroke.kv.format import KvFormat

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvCache:
    """Pages of keys and values, by page number. Who owns which page is the block pool's business, not this class's.

    Page 0 is scratch: the pool never gives it out, nothing writes it, and padded rows read it, so it stays zero.

    Attributes:
        format: shape and dtype of a page.
        pages: how many there are, the scratch page included.
        data: [pages, layers, 2 (key, value), block_tokens, kv_heads, head_dim].
    """

    def __init__(self, format: KvFormat, pages: int) -> None:  # noqa: A002 - the domain's word
        if pages < 2:
            raise Internal(f"a cache of {pages} pages has no room beside the scratch page")
        self.format = format
        self.pages = pages
        # numpy's zeros are pages the kernel gives on first touch; torch's would touch, and so take, all of them now.
        memory = torch.from_numpy(np.zeros(pages * format.block_bytes, dtype=np.uint8))
        self.data = memory.view(_DTYPES[format.dtype]).view(pages, *format.block_shape)

    def token_rows(self) -> Tensor:
        """Return the same memory with one row a token: [pages * layers * 2 * block_tokens, kv_heads, head_dim]."""
        return self.data.view(-1, self.format.kv_heads, self.format.head_dim)

    def rows(self) -> npt.NDArray[np.uint8]:
        """Return the same memory as bytes, one row a page: uint8 [pages, block_bytes]."""
        return self.data.view(self.pages, -1).view(torch.uint8).numpy()

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's bytes over another's (copy-on-write of a shared tail)."""
        self.data[target].copy_(self.data[source])
