"""The file of API keys: what it may hold, what is refused by name, and that no refusal repeats a key or a hash."""

from __future__ import annotations

import contextlib
import dataclasses
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.access.bearer import API_KEY_VARIABLE, authorization, presented, values_in
from twostroke.access.caller import Caller
from twostroke.access.keyfile import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    ApiKey,
    InvalidKeyFile,
    digest_of,
    entry,
    new_key,
    parse,
    read,
)
from twostroke.errors import InvalidRequest, PermissionDenied, Unauthenticated
from twostroke.types import Priority

HASH = sha256(b"a").hexdigest()
GOOD = f'[[key]]\nsha256 = "{HASH}"\ntenant = "search"\n'


def refusal(text: str | bytes) -> str:
    raw = text.encode() if isinstance(text, str) else text
    with pytest.raises(InvalidKeyFile) as caught:
        parse(raw)
    assert HASH not in str(caught.value)
    return str(caught.value)


def changed(**fields: Any) -> str:
    told = {"sha256": f'"{HASH}"', "tenant": '"search"', **fields}
    return "[[key]]\n" + "".join(f"{name} = {value}\n" for name, value in told.items() if value is not None)


def test_a_key_has_a_tenant_and_by_default_its_namespace_alone_and_standard_priority() -> None:
    (key,) = parse(GOOD.encode())
    assert key == ApiKey(
        digest=digest_of("a"), caller=Caller(tenant="search", namespace="search", highest=Priority.STANDARD)
    )


def test_two_tenants_may_share_a_namespace_and_one_tenant_may_have_two_keys() -> None:
    other, third = sha256(b"b").hexdigest(), sha256(b"c").hexdigest()
    text = changed(namespace='"public"') + f'[[key]]\nsha256 = "{other}"\ntenant = "mail"\nnamespace = "public"\n'
    text += f'[[key]]\nsha256 = "{third}"\ntenant = "mail"\n'
    callers = [key.caller for key in parse(text.encode())]
    assert [(each.tenant, each.namespace) for each in callers] == [
        ("search", "public"),
        ("mail", "public"),
        ("mail", "mail"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 keys"),
        ("# nothing yet\n", "has 0 keys"),
        ("key = []", "has 0 keys"),
        ("key = 1", "key must be tables"),
        ("key = [1]", "key must be tables"),
        ("[key]\n", "key must be tables"),
        (GOOD + "[[keys]]\n", "the file: unknown field keys"),
        (changed(tennant='"x"'), "key 1 (line 1): unknown field tennant"),
        ("\n# a comment\n" + GOOD + "\n" + changed(tenant=None), "key 2 (line 7): tenant must be"),
        (changed(sha256=None), "key 1 (line 1): sha256 must be 64 hexadecimal digits"),
        (changed(sha256=f'"{HASH[:-1]}"'), "sha256 must be 64"),
        (changed(sha256=f'"{HASH}0"'), "sha256 must be 64"),
        (changed(sha256=f'"{HASH[:-1]}g"'), "sha256 must be 64"),
        (changed(sha256="7"), "sha256 must be 64"),
        (changed(sha256='"ts-the-key-itself"'), "sha256 must be 64"),
        (changed(tenant='""'), "tenant must be"),
        (changed(tenant='"a b"'), "tenant must be"),
        (changed(tenant='"a\\n"'), "tenant must be"),
        (changed(tenant=f'"{"a" * 65}"'), "tenant must be"),
        (changed(namespace='""'), "namespace must be"),
        (changed(namespace="[]"), "namespace must be"),
        (changed(priority='"urgent"'), "priority must be one of interactive, standard, batch"),
        (changed(priority='"BATCH"'), "priority must be one of"),
        (changed(priority="0"), "priority must be one of"),
        (changed(priority="[]"), "priority must be one of"),
        (changed(label='"a\\tb"'), "label must be"),
        (changed(label=f'"{"a" * 129}"'), "label must be"),
        (changed(label="true"), "label must be"),
        (GOOD + GOOD, "key 2 (line 4): sha256 is that of key 1 (line 1) too"),
        (GOOD + changed(sha256=f'"{HASH.upper()}"'), "sha256 is that of key 1"),
        (GOOD + "tenant = ", "is not TOML (at "),
        (f"{HASH}\n", "is not TOML (at line 1, column 65)"),
        (f'{HASH} = "x"\n', "the file: unknown field with a long name"),
        (f"key = [{{ {HASH} = 1, {HASH} = 2 }}]", "is not TOML (at "),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("x = " + "9" * 10_000, "is not TOML"),
        (b"[[key]]\n\xff", "is not TOML in position 8"),
    ],
)
def test_what_is_wrong_is_refused_by_key_line_and_field(text: str | bytes, said: str) -> None:
    assert said in refusal(text)


def test_the_number_of_keys_and_the_size_of_the_file_are_bounded(tmp_path: Path) -> None:
    assert f"has {MAX_KEYS + 1} keys" in refusal("[[key]]\n" * (MAX_KEYS + 1))
    path = tmp_path / "keys.toml"
    path.write_bytes(bytes(MAX_FILE_BYTES + 1))
    with pytest.raises(InvalidKeyFile, match="has more than 4 MiB"):
        read(path)
    for wrong in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(InvalidKeyFile, match="cannot be read: "):
            read(wrong)


NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
LABELS = st.text(max_size=128).filter(str.isprintable)


@given(st.lists(st.tuples(NAMES, NAMES, st.sampled_from(Priority), LABELS), min_size=1, max_size=4))
def test_what_is_written_is_read_back(told: list[tuple[str, str, Priority, str]]) -> None:
    keys = tuple(
        ApiKey(
            digest=digest_of(new_key()), caller=Caller(tenant=tenant, namespace=namespace, highest=highest), label=label
        )
        for tenant, namespace, highest, label in told
    )
    assert parse("\n".join(map(entry, keys)).encode()) == keys


@given(st.binary(max_size=200) | st.text(alphabet='[]key=" \n#ab1', max_size=60).map(str.encode))
def test_any_bytes_are_keys_or_refused(raw: bytes) -> None:
    with contextlib.suppress(InvalidKeyFile):
        assert parse(raw)


def test_a_new_key_has_enough_entropy_and_fits_the_header() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(presented([f"Bearer {key}"]) == key and len(key) == len("ts-") + 43 for key in keys)


def test_a_key_shows_no_hash_to_whoever_prints_it() -> None:
    (key,) = parse(GOOD.encode())
    assert HASH not in repr(key)
    assert str(key.digest) not in repr(key)
    assert {field.name for field in dataclasses.fields(key)} == {"digest", "caller", "label"}


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_a_key_is_presented_as_a_bearer_token(scheme: str) -> None:
    assert presented([f"{scheme}ts-abc=="]) == "ts-abc=="


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["ts-abc"],
        ["Bearer"],
        ["Bearer "],
        ["Basic dTpw"],
        ["Bearer a b"],
        ["Bearer a,Bearer b"],
        ["Bearer " + "a" * 513],
        ["Bearer a", "Bearer a"],
        ["Bearer ä"],
        ["Bearer a\n"],
    ],
)
def test_what_is_no_bearer_token_is_unauthenticated_and_not_repeated(values: list[str]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        presented(values)
    assert "a" * 513 not in caught.value.message


def test_a_client_sends_the_key_it_is_given_or_that_of_the_environment_or_none() -> None:
    environ = {API_KEY_VARIABLE: "ts-env"}
    assert authorization("ts-given", environ) == {"authorization": "Bearer ts-given"}
    assert authorization(None, environ) == {"authorization": "Bearer ts-env"}
    assert authorization("", environ) == authorization(None, {}) == {}
    assert values_in(tuple(authorization(None, environ).items())) == ["Bearer ts-env"]
    with pytest.raises(InvalidRequest) as caught:
        authorization("secret key", {})
    assert "secret" not in caught.value.message


@given(st.sampled_from(Priority), st.none() | st.sampled_from(Priority))
def test_a_class_is_given_as_asked_or_refused_and_unasked_it_is_at_most_standard(
    highest: Priority, asked: Priority | None
) -> None:
    caller = Caller(highest=highest)
    if asked is not None and asked < highest:
        with pytest.raises(PermissionDenied) as caught:
            caller.priority(asked)
        assert caught.value.field == "priority"
        return
    given_ = caller.priority(asked)
    assert given_ == asked if asked is not None else given_ == max(Priority.STANDARD, highest)
