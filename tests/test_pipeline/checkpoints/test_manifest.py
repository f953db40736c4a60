"""The manifest of a checkpoint, and the digests of its files."""

import itertools
import os
import time
from dataclasses import asdict, replace
from hashlib import sha256

import pytest
import xxhash

from data.errors import CheckpointError
from pipeline.checkpoints import manifest as manifests
from pipeline.checkpoints.manifest import (
    SCHEMA,
    ChunkedRecord,
    committed,
    read_manifest,
    sealed,
)
from tests.support import savers
from tests.support.hostile_names import HOSTILE_NAMES

pytestmark = pytest.mark.quick


@pytest.fixture
def group(tmp_path) -> savers.WorkerGroup:
    """Return a run with committed steps 10 and 20."""
    return savers.with_steps(tmp_path / "run")


def test_newer_schema_is_refused_but_not_quarantined(group) -> None:
    newest = committed(group.folder)[0]
    savers.reseal(newest, schema=SCHEMA + 1)
    with pytest.raises(CheckpointError, match=r"has schema 2, but this code reads up to 1\n  update Patchline"):
        group.checkpoints_anew().choose(2, print)
    assert newest.is_dir()


def test_digests_of_a_save_match_its_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(manifests, "MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(manifests, "MAX_CHUNKS", 2)
    made = savers.WorkerGroup(tmp_path / "run")
    assert made.save(10)
    (step,) = committed(made.folder)
    for name, record in read_manifest(step).files.items():
        content = (step / name).read_bytes()
        chunks = [content[start : start + 512] for start in range(0, len(content), 512)]
        assert 256 < len(content) <= 1024, "two chunks of 512 bytes, the second shorter"
        assert record["sha256"] == sha256(content).hexdigest()
        assert record["bytes"] == len(content)
        assert record["chunk_bytes"] == 512
        assert record["chunks"] == "".join(xxhash.xxh3_64(chunk).hexdigest() for chunk in chunks)


def test_checkpoints_are_ordered_by_step_and_attempt_not_by_clock(tmp_path) -> None:
    group = savers.WorkerGroup(tmp_path / "run", attempt=1)
    for step in (10, 20, 30):
        group.save(step)
    later = savers.WorkerGroup(tmp_path / "run", attempt=2)
    assert later.save(30)  # repeated: the earlier attempt's copy stays, the later attempt's comes first
    expected = [p.name for p in committed(group.folder)]
    assert expected == [f"step-00000000{n}" for n in ("30-000002", "30", "20", "10")]
    for jumps in itertools.product((-1, 1), repeat=3):  # by an hour, forwards or backwards, between any two saves
        hours = itertools.accumulate((0, *jumps))
        for step, then in zip(reversed(expected), (time.time() + 3600 * hour for hour in hours), strict=True):
            os.utime(group.folder / step, (then, then))
            os.utime(group.folder / step / "MANIFEST.json", (then, then))
        assert [p.name for p in committed(group.folder)] == expected
        found = group.checkpoints_anew().choose(3, print)
        assert found is not None
        assert found[1].attempt == 2
    assert group.checkpoints.prune(2, 0) == expected[2:]


def test_folder_renamed_to_another_step_is_refused(group) -> None:
    os.rename(group.folder / "step-0000000010", group.folder / "step-0000000090")
    step, said = savers.pick(group.folder)
    assert step == 20
    assert "is the manifest of step 10, but its folder is named step-0000000090" in said[0]


def test_manifest_records_the_real_state(group) -> None:
    manifest = read_manifest(committed(group.folder)[0])
    assert asdict(manifest) == {**asdict(savers.manifest(20, 1, 2)), "files": manifest.files}
    assert sorted(manifest.files) == ["rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if isinstance(name, str)])
def test_manifest_with_a_name_outside_its_folder_is_refused(name, group) -> None:
    newest = committed(group.folder)[0]
    files: dict[str, ChunkedRecord] = {name: {"bytes": 1, "sha256": "0" * 64, "chunk_bytes": 1, "chunks": "0" * 16}}
    (newest / "MANIFEST.json").write_bytes(sealed(replace(read_manifest(newest), files=files)))
    with pytest.raises(CheckpointError, match="unsafe name"):
        read_manifest(newest)
