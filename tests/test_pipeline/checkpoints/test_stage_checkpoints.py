"""Checkpoints are complete or absent, can be loaded at any topology, and are never committed by a former owner."""

import errno
import os
import pickle
import random
import re
import shutil
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import models
from data import files
from data import storage as folder_storage
from data.errors import CheckpointError, RunOwned
from data.storage import Folder
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from jobs.ownership import Lease, claim_attempt
from pipeline.checkpoints import saver
from pipeline.checkpoints.manifest import (
    Manifest,
    committed,
    step_of,
)
from pipeline.checkpoints.stage_checkpoints import checkpoints_in
from pipeline.monitoring import watchdog
from pipeline.optimization import OptimConfig
from pipeline.training_config import TrainConfig
from tests.support import drives, hosts, savers

SEED = int(os.environ.get("FAULT_SEED", "20261120"))


@pytest.fixture
def group(tmp_path) -> savers.WorkerGroup:
    """Return a run with committed steps 10 and 20."""
    return savers.with_steps(tmp_path / "run")


# ------------------------------------------------------------------------ damage


def test_flipped_bit_is_reported_and_the_previous_checkpoint_loaded(group, tmp_path) -> None:
    rng, good = random.Random(SEED), tmp_path / "good"
    shutil.copytree(group.folder, good)
    files = sorted(committed(group.folder)[0].iterdir())
    sizes = [file.stat().st_size for file in files]
    found = 0
    for _ in range(300):
        file = rng.choices(files, sizes)[0]
        blob = bytearray(file.read_bytes())
        bit = rng.randrange(len(blob) * 8)
        blob[bit // 8] ^= 1 << bit % 8
        file.write_bytes(blob)
        step, said = savers.pick(group.folder)
        assert step == 10, f"bit {bit} of {file.name} went unnoticed (FAULT_SEED={SEED})"
        assert len(said) == 1
        assert file.name in said[0]
        assert "kept as bad-0000000020-000002" in said[0]
        assert (group.folder / "bad-0000000020-000002" / file.name).exists()
        savers.back(group.folder, good)
        found += 1
    print(f"{found} of 300 flipped bits found")


def test_missing_or_extra_files_are_reported(group, tmp_path) -> None:
    rng, good = random.Random(SEED), tmp_path / "good"
    shutil.copytree(group.folder, good)
    names = sorted(p.name for p in committed(group.folder)[0].iterdir())
    ways = ["cut", "empty", "longer", "not there", "one too many", "a folder"]
    for number in range(100):
        how = ways[number % len(ways)]
        file = committed(group.folder)[0] / names[number // len(ways) % len(names)]
        named = savers.damage(how, file, rng)
        step, said = savers.pick(group.folder)
        assert step == 10, f"{how} {file.name}: {said} (FAULT_SEED={SEED})"
        assert named in said[0], f"{how} {file.name}: {said} (FAULT_SEED={SEED})"
        savers.back(group.folder, good)


def test_pipe_in_place_of_a_file_does_not_block_the_start(group) -> None:
    savers.damage("a pipe", committed(group.folder)[0] / "rank-00001.safetensors", random.Random(0))
    assert savers.pick(group.folder)[0] == 10


def test_start_fails_if_no_checkpoint_is_intact(group) -> None:
    for step in committed(group.folder):
        (step / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints .* are damaged; they are kept as bad-"):
        group.checkpoints_anew().choose(2, print)
    assert len(list(group.folder.glob("bad-*"))) == 2
    assert group.checkpoints_anew().choose(3, print) is None  # the same command again starts from step 0


class Poison:
    """An object that runs `touch` when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return os.mkdir, (str(self.sentinel),)


def pickles(poison: Poison, path: Path) -> list[bytes]:
    """Return the malicious pickle in every format that some loader unpickles: raw, torch's two, NumPy's, a zip."""
    kinds = [pickle.dumps(poison, protocol) for protocol in (0, 2, 4, 5)]
    for zipped in (True, False):
        torch.save(poison, path, _use_new_zipfile_serialization=zipped)
        kinds.append(path.read_bytes())
    np.save(path.with_suffix(".npy"), np.array([poison], dtype=object), allow_pickle=True)
    kinds.append(path.with_suffix(".npy").read_bytes())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", kinds[1])
    return [*kinds, path.read_bytes()]


def test_poisoned_pickle_in_any_file_is_refused_without_running_it(group, tmp_path) -> None:
    sentinel, good = tmp_path / "executed", tmp_path / "good"
    shutil.copytree(group.folder, good)
    kinds = pickles(Poison(sentinel), tmp_path / "poison.pt")
    pickle.loads(kinds[0])
    assert sentinel.exists(), "the poison has no effect, the test would prove nothing"
    sentinel.rmdir()
    for blob in kinds:
        for name in sorted(p.name for p in committed(group.folder)[0].iterdir()):
            for resealed in {False, name != "MANIFEST.json"}:
                newest = committed(group.folder)[0]
                (newest / name).write_bytes(blob)
                if resealed:  # digests that match: only the file format prevents the attack
                    savers.reseal(newest)
                step, said = savers.pick(group.folder)
                assert step == 10
                assert name in said[0]
                assert not sentinel.exists()
                savers.back(group.folder, good)


# ------------------------------------------------------------------------ order and ownership


def test_commit_of_a_frozen_former_owner_is_refused(tmp_path) -> None:
    """Freeze 20 owners between writing their file and committing, while another attempt takes over."""
    run = tmp_path / "run"
    for round in range(20):
        former = savers.WorkerGroup(run, claim_attempt(Folder(run)))
        former.begin(100 + round)
        claim_attempt(Folder(run))  # another attempt starts meanwhile
        before = sorted(p.name for p in former.folder.iterdir() if not p.name.startswith("."))
        expected = f"attempt {2 * round + 2} now owns .*; this process is attempt {2 * round + 1}"
        with pytest.raises(RunOwned, match=expected):
            former.finish()
        assert sorted(p.name for p in former.folder.iterdir()) == before


def test_former_owner_with_deleted_files_commits_nothing(group) -> None:
    group.begin(30)
    assert savers.pick(group.folder)[0] == 20  # another start deletes the save in flight
    assert group.finish() is None
    assert "sees no file there after 0 s" in group.savers[0].failure
    assert savers.pick(group.folder)[0] == 20


# ------------------------------------------------------------------------ files not visible to rank 0


def test_file_not_visible_to_rank_0_fails_the_save_with_worker_node_and_path(group, monkeypatch) -> None:
    monkeypatch.setattr("data.files.SEEN_WITHIN_S", 0.2)
    for seen, said in ((None, "no file"), (b"half", "4 bytes")):
        group.begin(30)
        path = group.temporary(30) / "rank-00001.safetensors"
        path.unlink()
        if seen is not None:
            path.write_bytes(seen)
        assert group.finish() is None
        failure = group.savers[0].failure
        node = socket.gethostname()
        assert failure.startswith(f"worker 1 on {node} wrote {path} (")
        assert f"rank 0 on {node} sees {said} there after 0 s; {group.folder} must be the same storage" in failure
        assert savers.pick(group.folder)[0] == 20, "nothing was sealed"
        assert not path.parent.exists()


def test_wait_for_a_file_that_appears_late_is_logged(tmp_path) -> None:
    said: list[str] = []
    telemetry = savers.Quiet()
    telemetry.log = said.append  # type: ignore[method-assign]
    group = savers.WorkerGroup(tmp_path / "run", telemetry=telemetry)
    group.begin(30)
    path = group.temporary(30) / "rank-00001.safetensors"
    hidden = tmp_path / "hidden"
    path.rename(hidden)
    threading.Timer(1.2, hidden.rename, [path]).start()
    assert group.finish() is not None
    (line,) = said
    assert re.search(r"the files of all workers became visible to rank 0 in \S+ only after 1\.\d s", line)


@pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing())
@pytest.mark.parametrize("apart", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_worker_with_a_separate_disk_prevents_the_commit(apart, tmp_path) -> None:
    """Use two real workers, one with another disk at the run's path, like a node without the shared mount."""
    (tmp_path / "run").mkdir()
    failure = run_worker_group(
        savers.save_apart,
        {"run": str(tmp_path / "run"), "apart": apart},
        cluster=ClusterConfig(workers=2, backend="processes"),
        name="group",
        directory=tmp_path,
    )
    folders = [path.name for path in (tmp_path / "run" / "stage" / "checkpoints").iterdir()]
    if apart:
        assert isinstance(failure, str)
        assert re.match(r"worker 1 on \S+ wrote .*rank-00001.safetensors", failure)
        assert folders == []
    else:
        assert (failure, folders) == ("", ["step-0000000010"])


# ------------------------------------------------------------------------ full disks


def test_full_disk_error_reports_the_free_space_during_the_save(group, monkeypatch) -> None:
    """Report the free space during the save, not after the files of the failed save were deleted."""
    original = folder_storage.write_durably

    def full(path: Path, content: bytes) -> None:
        if path.name == "MANIFEST.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, content)

    monkeypatch.setattr(folder_storage, "write_durably", full)
    monkeypatch.setattr(files, "free_bytes", lambda path: 1_000 if path.parent.exists() else 9_000_000)
    assert group.save(30) is None
    assert group.savers[0].failure.endswith("MANIFEST.json (1.0 kB free)")


def test_foreign_files_among_the_attempts_are_ignored(tmp_path) -> None:
    assert claim_attempt(Folder(tmp_path)) == 1
    for name in ("notes.json", ".000009.123", ".000009.json.123.tmp"):
        (tmp_path / "attempts" / name).write_text("")
    assert claim_attempt(Folder(tmp_path)) == 2


@pytest.mark.parametrize("starts", [2, 20])
def test_exactly_one_of_several_concurrent_starts_owns_the_run(starts, tmp_path) -> None:
    lease = Lease(Folder(tmp_path / "run"), print)
    lease.record["pid"] = 4194305  # larger than any real pid, as if its process had been killed
    lease.take()
    crowd = [drives.fork_process(drives.own, str(tmp_path / "run"), str(tmp_path), number) for number in range(starts)]
    for process in crowd:
        process.start()
    while len(running := [process.sentinel for process in crowd if process.is_alive()]) > 1:
        wait(running)
    (winner,) = [process for process in crowd if process.is_alive()]
    (tmp_path / "go").touch()
    winner.join()
    assert sorted(process.exitcode for process in crowd) == [0] + [73] * (starts - 1)
    assert [p.name for p in tmp_path.glob("won-*")] == [f"won-{winner.pid}"]
    told = [p.read_text() for p in tmp_path.glob("lost-*")]
    assert len(told) == starts - 1, told
    assert all(f"is owned by process {winner.pid} on" in text for text in told), told


def test_pruning_keeps_the_newest_and_multiples_of_keep_every(tmp_path) -> None:
    group = savers.WorkerGroup(tmp_path / "run")
    for step in range(10, 80, 10):
        group.save(step)
    group.checkpoints.prune(2, 40)
    assert [step_of(p) for p in committed(group.folder)] == [70, 60, 40]
    assert not list(group.folder.glob(".tmp-*"))


@pytest.fixture
def slow_disk(monkeypatch) -> Iterator[SimpleNamespace]:
    """A disk that sets `was_asked` when it should delete something, and waits for `may_delete`, at most 10 s."""
    disk = SimpleNamespace(was_asked=threading.Event(), may_delete=threading.Event())
    rmtree = shutil.rmtree

    def delete(path: Path, **options: bool) -> None:
        disk.was_asked.set()
        disk.may_delete.wait(60)
        rmtree(path, **options)

    monkeypatch.setattr(folder_storage.shutil, "rmtree", delete)
    yield disk
    disk.may_delete.set()


OLD = ".tmp-old-step-0000000010"


@pytest.fixture
def deleting(slow_disk, tmp_path) -> Iterator[savers.WorkerGroup]:
    """Yield a run with keep=2 after its commit of step 30, while rank 0 is still deleting step 10."""
    group = savers.WorkerGroup(tmp_path / "run", keep=2)
    for step in (10, 20):
        group.save(step)
    group.begin(30)
    assert group.finish_only() is not None  # returns although nothing is deleted yet
    assert slow_disk.was_asked.wait(60)
    with group.collectives():
        yield group


def begin_alone(group: savers.WorkerGroup, step: int) -> saver.Saver:
    """Begin to save the step with rank 0's saver, without waiting for it; return the saver."""
    first = group.savers[0]
    first.begin(savers.FakeEngine(0, 2, step).fragments(), savers.manifest(step, 1, 2))
    return first


def heard(group: savers.WorkerGroup) -> list[str]:
    """Return the list that collects rank 0's log lines from now on."""
    lines: list[str] = []

    class Speaking(savers.Quiet):
        def log(self, text: str) -> None:
            lines.append(text)

    group.savers[0].telemetry = Speaking()  # type: ignore[assignment]
    return lines


def test_loop_continues_and_saves_while_an_old_checkpoint_is_deleted(deleting, slow_disk) -> None:
    assert [step_of(path) for path in committed(deleting.folder)] == [30, 20], "no start takes what is half deleted"
    assert (deleting.folder / OLD).is_dir()
    deleting.begin(40)  # fits next to the old one, so it is written
    assert deleting.finish_only() is not None
    assert (deleting.folder / OLD).is_dir()
    slow_disk.may_delete.set()
    deleting.savers[0].wait_for_deleting()
    assert [step_of(path) for path in committed(deleting.folder)] == [40, 30], "one deletion after the other"
    assert len(list(deleting.folder.iterdir())) == 2


def test_save_waits_for_a_deletion_if_it_does_not_fit_before(deleting, slow_disk, monkeypatch) -> None:
    def check_room(checkpoints: object, manifest: Manifest, needed_bytes: int) -> None:
        if (deleting.folder / OLD).exists():
            raise CheckpointError("full")

    monkeypatch.setattr(saver, "check_room", check_room)
    first = begin_alone(deleting, 40)
    time.sleep(0.2)
    assert not first.written
    slow_disk.may_delete.set()
    assert first.thread is not None
    first.thread.join()
    assert first.result.error == ""


def test_hanging_deletion_is_logged_and_does_not_block_a_save_that_fits(deleting, monkeypatch) -> None:
    monkeypatch.setattr(saver, "DELETING_S", 0.1)
    said = heard(deleting)
    deleting.begin(40)
    assert deleting.finish_only() is not None
    assert not said

    def check_room(checkpoints: object, manifest: Manifest, needed_bytes: int) -> None:
        raise CheckpointError("full")

    monkeypatch.setattr(saver, "check_room", check_room)
    first = begin_alone(deleting, 50)
    assert first.thread is not None
    first.thread.join(5)
    assert first.result.error.endswith("full"), said
    assert "still being deleted" in said[0], said
    assert first.deleting is not None, "a worker can end"
    assert first.deleting.daemon, "a worker can end"


def test_commit_is_announced_after_the_deletion_if_the_next_save_would_not_fit(
    slow_disk, tmp_path, monkeypatch
) -> None:
    """Workers other than rank 0 do not check for space and would find the disk full."""
    group = savers.WorkerGroup(tmp_path / "run", keep=2)
    for step in (10, 20):
        group.save(step)
    group.begin(30)
    monkeypatch.setattr(saver, "free_bytes", lambda folder: group.savers[0].expected_bytes - 1)
    threading.Timer(0.2, slow_disk.may_delete.set).start()
    assert group.finish_only() is not None
    assert group.listings[-1] == ["step-0000000020", "step-0000000030"]


def test_commit_is_announced_at_once_if_the_next_save_fits(deleting) -> None:
    assert {OLD, "step-0000000010"} & set(deleting.listings[-1])


def test_every_failure_of_a_deletion_is_logged(group, tmp_path, monkeypatch) -> None:
    said = heard(group)
    first = group.savers[0]
    first.saving = replace(first.saving, keep=2)

    def no_number() -> set[int]:
        return {int("10 copy")}  # from a file that somebody copied

    first.needed = [no_number]
    assert group.save(30) is not None
    assert len(said) == 1, said
    assert said[0].startswith("could not delete old checkpoints: ValueError: invalid literal"), said
    # A deletion that fails halfway.
    first.needed = []
    monkeypatch.setattr(folder_storage.shutil, "rmtree", lambda path, **options: None)
    assert group.save(40) is not None
    assert len(said) == 2, said
    assert OLD in said[1], said
    assert "could not delete all files of" in said[1], said


def test_commit_fails_if_the_rename_is_not_durable_and_the_step_can_be_saved_again(group, monkeypatch) -> None:
    refused = [group.folder]
    sync = folder_storage.sync

    def refuse(path: Path) -> None:
        if path in refused:
            refused.remove(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync(path)

    monkeypatch.setattr(folder_storage, "sync", refuse)
    assert group.save(30) is None
    assert "Input/output error" in group.savers[0].failure
    assert sorted(path.name for path in group.folder.iterdir()) == ["step-0000000010", "step-0000000020"]
    assert group.save(30) is not None
    assert committed(group.folder)[0].name == "step-0000000030"


def test_leftovers_of_a_deletion_count_as_free_space_for_the_next_start(tmp_path, monkeypatch) -> None:
    model = models.config_of("mu/8", 16, 10)
    cfg = TrainConfig(steps=1000, save_every=10)
    checkpoints = checkpoints_in(tmp_path)
    needed, _ = saver.bytes_to_come(cfg, model, checkpoints)
    (tmp_path / OLD).mkdir()
    (tmp_path / OLD / "rank-00000.safetensors").write_bytes(bytes(40_000))
    monkeypatch.setattr(saver, "free_bytes", lambda folder: needed - 40_000)
    saver.check_disk_space(cfg, model, checkpoints)
    monkeypatch.setattr(saver, "free_bytes", lambda folder: needed - 40_001)
    with pytest.raises(CheckpointError, match=r"minus 40.0 kB in .tmp-\* folders there, which are deleted at start-up"):
        saver.check_disk_space(cfg, model, checkpoints)
    assert checkpoints.choose(1, print) is None, "it does"
    assert not list(tmp_path.iterdir()), "it does"


def test_all_workers_wait_for_the_deletion_of_rank_0_at_the_end(tmp_path, monkeypatch) -> None:
    events: list[str] = []
    phases = watchdog.Phases.__new__(watchdog.Phases)
    monkeypatch.setattr(phases, "enter", lambda phase, step: events.append(phase))
    monkeypatch.setattr(saver.dist, "barrier", lambda: events.append("barrier"))
    made = savers.saver_of(checkpoints_in(tmp_path))
    made.phases = phases
    monkeypatch.setattr(made, "wait_for_deleting", lambda: events.append("deleting"))
    for rank in (0, 1):
        monkeypatch.setattr(saver.dist, "get_rank", lambda rank=rank: rank)
        made.end(7)
    assert events == ["save", "deleting", "wait", "barrier", "save", "wait", "deleting", "barrier"]


def test_metrics_of_a_save_are_on_disk_before_its_commit(tmp_path) -> None:
    events: list[str] = []
    group = savers.WorkerGroup(tmp_path / "run")

    class Watching(savers.Quiet):
        def sync(self) -> None:
            events.append(f"fsync, {len(committed(group.folder))} committed, in flight: {group.savers[0].in_flight}")

    for of_rank in group.savers:
        of_rank.telemetry = Watching()  # type: ignore[assignment]
    group.save(10)
    # Once, by rank 0, after the save has begun: by then the loop has written the records of its steps.
    assert events == ["fsync, 0 committed, in flight: True"]
    assert [step_of(path) for path in committed(group.folder)] == [10]


@pytest.mark.parametrize(
    ("name", "polyak", "copies", "keep", "checkpoints"),
    [("adam", 0.0, 3, 3, 4), ("adam", 0.9, 4, 3, 4), ("sgd", 0.0, 2, 3, 4), ("adam", 0.0, 3, 2, 3)],
)
def test_required_space_covers_kept_checkpoints_one_more_and_the_weights(
    name, polyak, copies, keep, checkpoints, tmp_path, monkeypatch
) -> None:
    model = models.config_of("mu/8", 16, 10)
    parameters = sum(parameter.numel() for parameter in models.build("mu/8", 16, 10).parameters())
    cfg = TrainConfig(steps=1000, save_every=10, keep=keep, polyak=polyak, optim=OptimConfig(name=name))
    needed = (
        checkpoints * (copies * 4 * parameters + saver.HEADER_BYTES) + 4 * parameters
    )  # fp32: four bytes per number
    monkeypatch.setattr(saver, "free_bytes", lambda folder: needed)
    saver.check_disk_space(cfg, model, checkpoints_in(tmp_path))
    monkeypatch.setattr(saver, "free_bytes", lambda folder: needed - 1)
    with pytest.raises(CheckpointError, match=f"{checkpoints} checkpoints of"):
        saver.check_disk_space(cfg, model, checkpoints_in(tmp_path))


def test_files_already_written_by_a_save_count_as_free_space(tmp_path, monkeypatch) -> None:
    group = savers.WorkerGroup(tmp_path / "run")
    group.temporary(10).mkdir(parents=True)
    (group.temporary(10) / "rank-00000.safetensors").write_bytes(bytes(60_000))
    monkeypatch.setattr(saver, "free_bytes", lambda folder: 40_000)
    manifest = savers.manifest(10, 1, 2)
    saver.check_room(group.checkpoints, manifest, 100_000)
    with pytest.raises(CheckpointError, match=r"\(100.1 kB needed, 40.0 kB free\)"):
        saver.check_room(group.checkpoints, manifest, 100_100)
