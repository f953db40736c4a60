"""A start loads the newest intact checkpoint, on all workers alike, at any topology."""

import errno
import os
import re

import pytest

from data import storage as folder_storage
from data.errors import CheckpointError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.checkpoints import reader
from pipeline.checkpoints.manifest import (
    committed,
)
from tests.support import savers


@pytest.fixture
def group(tmp_path) -> savers.WorkerGroup:
    """Return a run with committed steps 10 and 20."""
    return savers.with_steps(tmp_path / "run")


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    "topologies",
    [
        pytest.param({1: (0,), 2: (1,), 3: (3,), 4: (2,)}, id="4-topologies"),
        pytest.param(
            dict.fromkeys((1, 2, 3, 4, 6, 8), ALL),
            id="24-topologies",
            marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
        ),
    ],
)
def test_every_topology_loads_what_another_saved_bit_for_bit(topologies, tmp_path) -> None:
    """Load from each world size and ZeRO stage at each other: masters, moments and model weights are equal."""
    values = [
        run_worker_group(
            act,
            {"run": str(tmp_path / "run"), "zeros": zeros},
            cluster=ClusterConfig(workers=world, backend="processes"),
            name=f"{act.__name__}-{world}",
            directory=tmp_path,
        )
        for act in (savers.save_known, savers.load_known)
        for world, zeros in topologies.items()
    ][len(topologies) :]
    count = sum(map(len, topologies.values()))
    assert [value["wrong"] for value in values] == [[]] * len(topologies)
    assert sum(value["loads"] for value in values) == count**2
    assert len({tuple(value["elements"]) for value in values}) == 1
    assert len(values[0]["elements"]) == 1
    assert {len(value["outputs"]) for value in values} == {1}, "the weights in use differ from the masters"
    assert len({value["outputs"][0] for value in values}) == 1
    print(f"{count**2} loads bit-equal")


def test_failing_storage_quarantines_no_checkpoint(group, monkeypatch) -> None:
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(reader.os, "preadv", refuse)
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoints: .*Permission denied"):
        savers.pick(group.folder)
    assert len(committed(group.folder)) == 2


def test_damaged_checkpoint_that_cannot_be_renamed_raises_on_all_workers(group, monkeypatch) -> None:
    file = committed(group.folder)[0] / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def refuse(source, target) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(source))

    told: list[object] = []
    monkeypatch.setattr(folder_storage.os, "rename", refuse)
    monkeypatch.setattr(savers.ALONE, "broadcast_object_list", lambda values, src: told.extend(values))
    with pytest.raises(CheckpointError) as raised:
        savers.start_from(group.folder, 2, print)
    assert told[-1] is raised.value, "what rank 0 raises has gone to the others first"
    assert re.search(r"rank-00001.safetensors: bytes 0 to .*Read-only file system: .*step-0+20'\n", str(raised.value))
    assert len(committed(group.folder)) == 2


CASES = [(2, "rank-00001.safetensors"), (0, "rank-00001.safetensors"), (2, "")]


MORE_CASES = [(3, "rank-00001.safetensors"), (3, "rank-00000.safetensors"), (1, "MANIFEST.json"), (0, ""), (3, "")]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)], ids=["few", "more"])
def test_damage_found_by_one_worker_makes_all_load_the_previous_checkpoint(cases, tmp_path) -> None:
    """Use two real workers: at ZeRO 1 and 2 each reads its own part of the state; at 0 they share the reading."""
    everybody = run_worker_group(
        savers.load_damaged,
        {"run": str(tmp_path), "cases": cases},
        cluster=ClusterConfig(workers=2, backend="processes"),
        name="group",
        directory=tmp_path,
    )
    names = ["step-0000000010", "step-0000000020"]
    for (zero, file), first, second in zip(cases, *everybody, strict=True):
        if not file:
            # The bytes on disk are right: no checkpoint is to blame, and none is quarantined.
            assert first["error"] == second["error"] != ""
            assert first["left"] == names
            assert "rank-00001.safetensors: bytes 0 to " in first["error"]
            assert "read by worker 1 on" in first["error"]
            assert "rank 0 on" in first["error"]
            assert "read the same checkpoint without errors\n  nothing was changed" in first["error"]
            continue
        for outcome in (first, second):
            assert (outcome["step"], outcome["wrong"], outcome["error"]) == (10, 0, ""), (zero, file, outcome)
            assert outcome["left"] == ["bad-0000000020-000002", "step-0000000010"]
        (line,) = first["log"]
        assert file in line
        assert "kept as bad-0000000020-000002; trying the previous checkpoint" in line
        assert second["log"] == [], "rank 0 speaks for all"
        if zero == 2:  # worker 1 reads only its own file
            assert "(read by worker 1 on" in line
            assert "the file has changed" in line


def test_start_fails_if_all_checkpoints_have_damaged_data(group) -> None:
    for step in committed(group.folder):
        file = step / "rank-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints .* are damaged; they are kept as bad-"):
        savers.start_from(group.folder, 2, print)
    assert len(list(group.folder.glob("bad-*"))) == 2
