"""The digest of a model's files, found again by what the file system says of them."""

import os
from pathlib import Path

from tests.support.tiny import write_tiny
from twostroke.engine.loading.digests import DigestIndex, FileState, weights_digest
from twostroke.engine.loading.folder import folder_config


def test_a_known_state_gives_the_same_digest_and_a_damaged_entry_is_not_believed(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    config, path = folder_config(folder), folder / "model.safetensors"
    index = DigestIndex(tmp_path, settle_seconds=0)
    digest = index.digest(config, [path])
    (entry,) = tmp_path.glob("*.digest")
    assert index.digest(config, [path]) == digest == weights_digest(config, [path])
    entry.write_bytes(bytes(16) + entry.read_bytes()[16:])
    assert index.digest(config, [path]) == digest


def test_the_index_keeps_the_latest_entries_only(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    config, path = folder_config(folder), folder / "model.safetensors"
    index = DigestIndex(tmp_path, settle_seconds=0, max_entries=2)
    for nanoseconds in (1, 2, 3, 4):
        os.utime(path, ns=(0, nanoseconds))
        index.digest(config, [path])
    assert len(list(tmp_path.glob("*.digest"))) == 2


def test_the_state_of_a_file_moves_with_its_content_whatever_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    os.utime(path, ns=(0, 0))
    before = FileState.of(path)
    path.write_bytes(b"two")
    os.utime(path, ns=(0, 0))
    assert FileState.of(path) != before
    assert FileState.of(path).modified_ns == before.modified_ns
