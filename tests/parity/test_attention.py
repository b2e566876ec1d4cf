"""Backends against the float64 reference, on page tables that hypothesis makes up."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.engine.attention.reference import ReferenceAttention
from twostroke.engine.attention.torch import TorchAttention
from twostroke.engine.batch import Batch, Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.kv.format import KvFormat

LAYERS = 2


@dataclass(frozen=True)
class Case:
    group: int
    kv_heads: int
    width: int
    page_tokens: int
    spans: tuple[tuple[int, int], ...]  # (prefix, new tokens) of each segment
    seed: int
    dtype: str = "float32"

    def caches(self) -> tuple[KvCache, KvCache, Batch]:
        """Two caches with equal prefixes and NaN everywhere else, and the batch that follows."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-(prefix + new) // self.page_tokens) for prefix, new in self.spans]
        shuffled = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
        first, second = (KvCache(self.format(), len(shuffled) + 1) for _ in range(2))
        first.data[1:] = float("nan")  # page 0 is scratch and stays zero
        segments = []
        for (prefix, new), count in zip(self.spans, counts, strict=True):
            pages = [shuffled.pop() for _ in range(count)]
            for position in range(prefix):
                page, offset = pages[position // self.page_tokens], position % self.page_tokens
                first.data[page, :, :, offset] = torch.randn(LAYERS, 2, self.kv_heads, self.width, generator=generator)
            segments.append(Segment(range(new), prefix, pages, sample=True))
        second.data.copy_(first.data)
        return first, second, build_batch(segments, self.page_tokens)

    def format(self) -> KvFormat:
        return KvFormat(
            model="case",
            weights_digest=b"",
            weight_mode="f32",
            layers=LAYERS,
            kv_heads=self.kv_heads,
            head_dim=self.width,
            block_tokens=self.page_tokens,
            dtype=self.dtype,
            rope_digest=b"",
        )

    def tensors(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        q = torch.randn(tokens, self.group * self.kv_heads, self.width, generator=generator)
        k, v = (torch.randn(tokens, self.kv_heads, self.width, generator=generator) for _ in range(2))
        return q, k, v


def check(case: Case, tolerance: float = 2e-6) -> None:
    ours, judges, batch = case.caches()
    backend, reference = TorchAttention(ours), ReferenceAttention(judges)
    plan, truth = backend.plan(batch), reference.plan(batch)
    q, k, v = case.tensors(len(batch.token_ids))
    for layer in range(LAYERS):
        out, expected = backend.attend(layer, q, k, v, plan), reference.attend(layer, q, k, v, truth)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.data, judges.data, rtol=0, atol=0, equal_nan=True)
    assert not ours.data[0].any()


spans = st.tuples(st.one_of(st.just(0), st.integers(1, 40)), st.one_of(st.just(1), st.integers(1, 24)))


@settings(deadline=None, max_examples=120)
@given(
    st.builds(
        Case,
        group=st.sampled_from([1, 2, 3, 4, 7]),
        kv_heads=st.integers(1, 3),
        width=st.sampled_from([16, 64]),
        page_tokens=st.sampled_from([1, 4, 16]),
        spans=st.lists(spans, min_size=1, max_size=6).map(tuple),
        seed=st.integers(0, 1 << 30),
    )
)
def test_any_mix_of_decodes_and_chunks_equals_the_reference_and_no_stale_byte_leaks(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("last", range(1, 17))
def test_every_fill_of_the_last_page_is_right(last: int) -> None:
    check(Case(group=3, kv_heads=3, width=64, page_tokens=16, spans=((15 + last, 1), (last - 1, 17)), seed=last))


def test_decodes_of_very_different_lengths_are_right() -> None:
    check(Case(group=3, kv_heads=1, width=16, page_tokens=16, spans=((700, 1), (3, 1), (340, 1), (0, 1)), seed=5))


def test_a_chunk_after_a_long_prefix_is_right() -> None:
    check(Case(group=2, kv_heads=2, width=16, page_tokens=16, spans=((600, 130), (64, 64)), seed=6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cache_of_half_precision_attends_exactly_what_it_stores(dtype: str) -> None:
    check(Case(group=3, kv_heads=1, width=16, page_tokens=4, spans=((0, 9), (7, 1), (6, 5)), seed=7, dtype=dtype))
