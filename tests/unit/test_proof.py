"""Proofs of leases: only the very names under the very key are proven."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twostroke.kv import proof

KEY = bytes(range(32))
NAMES = st.fixed_dictionaries({name: st.text(max_size=8) for name in ("incarnation", "lease_id", "namespace")})


@given(NAMES, NAMES)
def test_a_proof_proves_the_lease_that_was_signed_and_no_other(signed: dict[str, str], asked: dict[str, str]) -> None:
    assert proof.verify(KEY, proof.sign(KEY, **signed), **asked) == (signed == asked)


@given(st.text(max_size=8), st.integers(0, 8))
def test_names_that_join_to_the_same_text_have_different_proofs(text: str, at: int) -> None:
    whole = proof.sign(KEY, incarnation="i", lease_id=text, namespace="")
    parted = proof.sign(KEY, incarnation="i", lease_id=text[:at], namespace=text[at:])
    assert (whole == parted) == (text[at:] == "")


@given(NAMES, st.binary(max_size=40))
def test_what_was_not_signed_is_no_proof(names: dict[str, str], forged: bytes) -> None:
    assert not proof.verify(KEY, forged, **names)
    assert not proof.verify(KEY, proof.sign(KEY, **names)[:-1], **names)


def test_a_node_s_key_is_its_own_in_each_life_unless_the_cluster_has_a_secret() -> None:
    assert proof.node_key("a") != proof.node_key("a")
    assert proof.node_key("a", b"secret") == proof.node_key("a", b"secret")
    assert len({proof.node_key(life, secret) for life in ("a", "b") for secret in (b"secret", b"other")}) == 4
    assert len(proof.node_key("a")) == len(proof.node_key("a", b"secret")) == proof.PROOF_BYTES


def test_a_derived_key_is_not_the_proof_of_any_lease() -> None:
    assert proof.node_key("a", KEY) != proof.sign(KEY, incarnation="a", lease_id="", namespace="")
