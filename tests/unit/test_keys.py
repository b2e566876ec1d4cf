"""Block keys and format digests: golden vectors, and no two inputs with one encoding."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from twostroke.errors import FormatMismatch
from twostroke.kv.format import KvFormat
from twostroke.kv.keys import block_key, block_keys, request_root, root_key
from twostroke.types import CachePolicy, RequestContext

FORMAT = KvFormat(
    model="tiny",
    weights_digest=bytes(range(16)),
    weight_mode="f16",
    layers=2,
    kv_heads=3,
    head_dim=4,
    block_tokens=16,
    dtype="float32",
    rope_digest=bytes(range(16, 32)),
)
ROOT = "9c1d7f7609bff1c62d145e9af938c670"
KEYS = ["137dc2f6b47dfbf6b4b5a2e7cd3d8f5c", "4ea515b5e516a6a5ca37b4a31483c444"]

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
names = st.text(max_size=8)


def test_the_encodings_stand_still() -> None:
    root = root_key(FORMAT.digest, "default")
    assert FORMAT.digest.hex() == "c6bbb08284200b68410903bb1696000e"
    assert root.hex() == ROOT
    assert root_key(FORMAT.digest, "default", "salt").hex() == "335a3aaac14cc3b6d4087ee4610c3859"
    assert block_key(root, [1, 2, 3]).hex() == "7f37e9db014d6e408d655020106f09f4"
    assert [key.hex() for key in block_keys(root, range(33), 16)] == KEYS


def test_a_process_with_another_hash_seed_makes_the_same_keys() -> None:
    code = (
        "from twostroke.kv.keys import block_keys\n"
        f"print([key.hex() for key in block_keys(bytes.fromhex({ROOT!r}), range(33), 16)])"
    )
    made = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, check=True)
    assert made.stdout.decode().strip() == str(KEYS)


@given(tokens, tokens)
def test_equal_keys_mean_equal_tokens(first: list[int], second: list[int]) -> None:
    root = bytes.fromhex(ROOT)
    assert (block_key(root, first) == block_key(root, second)) == (first == second)


@given(st.tuples(names, names, names), st.tuples(names, names, names))
@example(("X", "", ""), ("", "", "X"))
@example(("", "ab", "c"), ("", "a", "bc"))
def test_no_two_adapters_namespaces_and_salts_share_a_root(
    first: tuple[str, str, str], second: tuple[str, str, str]
) -> None:
    roots = [
        root_key(dataclasses.replace(FORMAT, adapter=adapter).digest, namespace, salt)
        for adapter, namespace, salt in (first, second)
    ]
    assert (roots[0] == roots[1]) == (first == second)


@given(tokens, st.integers(1, 17))
def test_the_keys_of_a_prefix_are_a_prefix_of_the_keys(prompt: list[int], size: int) -> None:
    root = bytes.fromhex(ROOT)
    keys = block_keys(root, prompt, size)
    assert len(keys) == len(prompt) // size
    assert block_keys(root, prompt[: size * (len(keys) // 2)], size) == keys[: len(keys) // 2]
    assert len(set(keys)) == len(keys)


def test_a_block_never_has_the_key_of_a_root() -> None:
    material = b"f" + (16).to_bytes(4, "little") + FORMAT.digest
    as_tokens = [int.from_bytes(material[at : at + 4], "little") for at in range(0, len(material) - 3, 4)]
    assert block_key(b"", as_tokens) != root_key(FORMAT.digest, "")


def test_a_salt_cannot_imitate_a_request_that_bypasses_the_cache() -> None:
    bypass = RequestContext(request_id="r", cache_policy=CachePolicy.BYPASS)
    salted = RequestContext(request_id="s", salt="request:r")
    plain = RequestContext(request_id="t", salt="")
    roots = [request_root(FORMAT.digest, each) for each in (bypass, salted, plain)]
    assert len(set(roots)) == 3
    assert roots[2] == root_key(FORMAT.digest, "default")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KvFormat)])
def test_every_field_of_a_format_is_in_its_digest_and_named_by_a_refusal(field: str) -> None:
    value = getattr(FORMAT, field)
    changed = value + 1 if isinstance(value, int) else value + value[:1] if value else "x"
    other = dataclasses.replace(FORMAT, **{field: changed})
    assert other.digest != FORMAT.digest
    with pytest.raises(FormatMismatch) as refused:
        FORMAT.require_equal(other, who="prefill")
    assert refused.value.field == f"kv_format.{field}"
    assert "prefill" in refused.value.message


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_neighbouring_fields_do_not_run_into_each_other(model: str, adapter: str, other: str, tail: str) -> None:
    one = dataclasses.replace(FORMAT, model=model, adapter=adapter)
    two = dataclasses.replace(FORMAT, model=other, adapter=tail)
    assert (one.digest == two.digest) == ((model, adapter) == (other, tail))


def test_a_block_has_as_many_bytes_as_its_shape() -> None:
    assert FORMAT.block_shape == (2, 2, 16, 3, 4)
    assert FORMAT.block_bytes == 2 * 2 * 16 * 3 * 4 * 4
    assert dataclasses.replace(FORMAT, dtype="float16").block_bytes == FORMAT.block_bytes // 2
