from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint import Fingerprint, check_fingerprints
from surefoot.checkpoint.lineage import LineageEntry
from surefoot.checkpoint.manifest import (
    Extent,
    FileEntry,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    structure_problems,
)
from surefoot.checkpoint.sealed import seal
from surefoot.errors import CorruptCheckpoint, ResumeRefused

HASH = "0123456789abcdef" * 2


def example(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "step": 4,
        "run_id": "run",
        "lineage": (LineageEntry(1, 0, None, None), LineageEntry(3, 2, "/rescue/step_2", HASH, "key")),
        "files": (FileEntry("a/b.bin", 5, (Extent(0, 5, HASH),)), FileEntry("empty", 0, ())),
        "fingerprints": {"model": Fingerprint("f00", "llama, 2 layers")},
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**{**values, **changes})


def altered(change: Any) -> bytes:
    """A manifest with a sound checksum and unsound content."""
    body = json.loads(encode_manifest(example()))
    del body["checksum"]
    change(body)
    return seal(body)


def test_round_trip() -> None:
    decoded = decode_manifest(encode_manifest(example()))
    assert decoded.checksum
    assert decoded == example(checksum=decoded.checksum)
    assert (decoded.attempt.number, decoded.num_bytes) == (3, 5)


def test_every_single_bit_flip_and_every_cut_is_seen() -> None:
    data = encode_manifest(example())
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ValueError):
            decode_manifest(bytes(flipped))
    for length in range(len(data)):
        with pytest.raises(ValueError):
            decode_manifest(data[:length])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.update(schema_version=2), "schema version is 2; this Surefoot reads version 1"),
        (lambda b: b.pop("schema_version"), "schema version is None"),
        (lambda b: b["files"][0].update(path="../../etc/passwd"), "not a plain relative path"),
        (lambda b: b["files"][0].update(path="/etc/passwd"), "not a plain relative path"),
        (lambda b: b["files"].append(b["files"][0]), "one path twice"),
        (lambda b: b["files"][0].update(path="manifest.json"), "or itself"),
        (lambda b: b["files"][0].update(size=6), "cover 5 bytes of 6"),
        (lambda b: b["files"][0].update(extents=[[1, 4, HASH]]), "gaps"),
        (lambda b: b["files"][0].update(extents=[[0, 5, "xyz"]]), "malformed"),
        (lambda b: b["files"][0].update(extents=[[0, 5]]), "not a manifest"),
        (lambda b: b["files"][0].update(extents=[[0, "5", HASH]]), "not a manifest"),
        (lambda b: b.update(files=[{"path": "big", "size": 17 << 20, "extents": [[0, 17 << 20, HASH]]}]), "malformed"),
        (lambda b: b.update(files=7), "not a manifest"),
        (lambda b: b.update(lineage=[]), "lineage"),
        (lambda b: b.update(lineage=[[1, 0, None, 5]]), "lineage"),
        (lambda b: b.update(lineage=[[1, 0, None, None, None]]), "lineage"),
        (lambda b: b.update(lineage=[[1, 0, None, None, "key", 7]]), "lineage"),
        (lambda b: b.update(step="4"), "another type"),
        (lambda b: b.pop("run_id"), "not a manifest"),
    ],
)
def test_sound_checksum_unsound_content(change: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_manifest(altered(change))


def test_half_a_surrogate_pair_is_damage_not_a_crash() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        decode_manifest(altered(lambda body: body["files"][0].update(path="\ud800")))


def test_a_path_too_long_for_the_system_is_damage_not_a_crash(memory_path: Path) -> None:
    path = "/".join(["a"] * 5000)
    manifest = decode_manifest(altered(lambda body: body["files"][0].update(path=path)))
    assert any("too long" in problem for problem in structure_problems(memory_path, manifest))


def test_deep_nesting_is_damage_not_a_crash() -> None:
    with pytest.raises(ValueError):
        decode_manifest(b"[" * 100_000)


def test_no_manifest_a_linked_one_and_a_damaged_one(memory_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"has no manifest\.json"):
        read_manifest(memory_path)
    (memory_path / "elsewhere").write_bytes(encode_manifest(example()))
    (memory_path / "manifest.json").symlink_to(memory_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        read_manifest(memory_path)
    (memory_path / "manifest.json").unlink()
    (memory_path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        read_manifest(memory_path)


def test_structure_sees_missing_cut_and_linked_files(memory_path: Path) -> None:
    manifest = example()
    (memory_path / "a").mkdir()
    (memory_path / "a" / "b.bin").write_bytes(b"12345")
    (memory_path / "empty").touch()
    assert structure_problems(memory_path, manifest) == []
    (memory_path / "a" / "b.bin").write_bytes(b"1234")
    assert structure_problems(memory_path, manifest) == ["a/b.bin: 4 bytes, the manifest says 5"]
    (memory_path / "a" / "b.bin").unlink()
    assert structure_problems(memory_path, manifest) == ["a/b.bin: No such file or directory"]
    (memory_path / "a" / "b.bin").symlink_to("/dev/zero")
    assert structure_problems(memory_path, manifest) == ["a/b.bin: not a regular file"]
    (memory_path / "a" / "b.bin").unlink()
    (memory_path / "a").rmdir()
    (memory_path / "real").mkdir()
    (memory_path / "real" / "b.bin").write_bytes(b"12345")
    (memory_path / "a").symlink_to("real")
    assert structure_problems(memory_path, manifest) == ["a: a link, not a folder"]


def test_fingerprints_that_differ_are_refused_naming_both_unless_allowed() -> None:
    manifest = example()
    same = {"model": Fingerprint("f00", "the same under another description")}
    check_fingerprints(manifest, same)
    other = {"model": Fingerprint("b00", "llama, 4 layers")}
    with pytest.raises(ResumeRefused, match=r"(?s)model: .*llama, 2 layers.*llama, 4 layers"):
        check_fingerprints(manifest, other)
    check_fingerprints(manifest, other, {"model"})
    with pytest.raises(ResumeRefused, match=r"dataset: .*not recorded"):
        check_fingerprints(manifest, {**same, "dataset": Fingerprint("d", "gsm8k")}, {"model"})
    check_fingerprints(manifest, {**same, "layout": Fingerprint("2", "two ranks")})  # any layout may resume
