"""Files and checkpoints in an object store are complete or absent, and created only once, whatever faults occur.

The store is moto, which serves the S3 protocol on loopback; a proxy in front of it injects faults. The tests read the
objects back with boto3, which is independent of the code under test.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data import bucket as bucket_module
from data.bucket import REFUSED, SWEPT, Bucket
from data.errors import CheckpointError, Preempted, RunOwned, StorageError
from data.seal import seal
from jobs import ownership
from jobs.__main__ import main
from jobs.cluster import supervisor
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster_config import ClusterConfig
from jobs.ownership import Lease, claim_attempt
from jobs.run import sync
from pipeline import artifacts
from pipeline.checkpoints import restore, stage_checkpoints
from pipeline.checkpoints.reader import Reader
from pipeline.checkpoints.restore import choose_together
from pipeline.checkpoints.stage_checkpoints import Chosen, StageCheckpoints
from tests.support import savers
from tests.support.contexts import pretrain_context
from tests.support.stores import objects

BUCKET = "images"
SCRATCH = Path("/nowhere")  # unused: these tests store only small files
STAGE = "stage"  # the folder of savers.WorkerGroup
ALONE = SimpleNamespace(  # torch.distributed, of one worker
    get_rank=lambda: 0,
    get_world_size=lambda: 1,
    all_gather_object=lambda values, mine: values.__setitem__(0, mine),
    broadcast_object_list=lambda values, src: None,
)
FLAKY = [500, 503, 429, "deaf", "stall"]


# ------------------------------------------------------------------------ one file


# ------------------------------------------------------------------------ checkpoints


@pytest.fixture
def group(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> savers.WorkerGroup:
    """Return a run of two workers with committed steps 10 and 20 of attempt 1."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert claim_attempt(Bucket(run, SCRATCH)) == 1
    made = savers.WorkerGroup(tmp_path / "run", remote=run)
    assert made.save(10)
    assert made.save(20)
    return made


def committed_steps(run: str) -> list[int]:
    return StageCheckpoints(Bucket(run, SCRATCH), STAGE).committed_steps()


def start(run: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Chosen | None, list[str]]:
    """Return what a new single-worker attempt loads on a machine with an empty disk, and its log lines."""
    monkeypatch.setattr(restore, "dist", ALONE)
    shutil.rmtree(scratch, ignore_errors=True)
    said: list[str] = []
    attempt = claim_attempt(Bucket(run, scratch))
    return choose_together(StageCheckpoints(Bucket(run, scratch), STAGE), attempt, said.append), said


def assert_is_step(chosen: Chosen | None, step: int) -> None:
    """Assert that the state is savers.FakeEngine's artificial state of the step."""
    assert chosen is not None
    assert chosen.manifest.step == step
    reader = Reader(chosen.folder, chosen.manifest.files)
    assert torch.equal(reader("w", "master", 0, 96), savers.known("w", "master", 0, 96) + step)


def key(step: int, file: str, attempt: int = 1) -> str:
    return f"{STAGE}/checkpoints/step-{step:010d}-{attempt:06d}/{file}"


def test_checkpoint_saved_on_one_machine_loads_on_another(group, run, bucket, tmp_path, monkeypatch) -> None:
    assert committed_steps(run) == [20, 10]
    assert not list(group.folder.iterdir()), "what is in the store is not kept here"
    chosen, said = start(run, tmp_path / "other", monkeypatch)
    assert_is_step(chosen, 20)
    assert said == []


def test_a_frozen_owner_that_wakes_up_commits_nothing(group, run, tmp_path, monkeypatch) -> None:
    group.begin(30)
    chosen, _ = start(run, tmp_path / "other", monkeypatch)
    assert_is_step(chosen, 20)
    with pytest.raises(RunOwned, match=r"step 30 is not committed: attempt 2 now owns s3://.*; this process is"):
        group.finish()
    assert committed_steps(run) == [20, 10]


def test_frozen_owner_that_wakes_up_uploads_no_metrics(group, run, tmp_path, monkeypatch) -> None:
    group.checkpoints.sends_metrics = True
    (tmp_path / "run" / STAGE / "metrics.jsonl").write_text("of the first owner\n")
    assert group.save(30)
    assert Bucket(run, SCRATCH).read(f"{STAGE}/metrics.jsonl") == b"of the first owner\n"
    start(run, tmp_path / "other", monkeypatch)
    Bucket(run, SCRATCH).put(f"{STAGE}/metrics.jsonl", b"of the second owner\n")
    group.begin(40)
    assert Bucket(run, SCRATCH).read(f"{STAGE}/metrics.jsonl") == b"of the second owner\n"


def test_owner_frozen_between_its_last_check_and_the_commit_commits_nothing(
    group, run, bucket, tmp_path, monkeypatch
) -> None:
    """At the last moment before the commit, all files are uploaded and checked, and there is no newer claim."""
    create = Bucket.create_once
    starts: list[Any] = []

    def create_late(self: Bucket, name: str, content: bytes) -> bool:
        if name == key(30, "MANIFEST.json") and not starts:
            starts.append(None)
            starts[0] = start(run, tmp_path / "other", monkeypatch)
        return create(self, name, content)

    monkeypatch.setattr(Bucket, "create_once", create_late)
    with pytest.raises(RunOwned, match="step 30 is not committed: a newer attempt has replaced it"):
        group.save(30)
    assert_is_step(starts[0][0], 20)
    assert committed_steps(run) == [20, 10]
    assert key(30, "rank-00000.safetensors") not in objects(bucket, run), "what can never be committed is deleted"


def test_an_owner_that_commits_while_the_next_one_starts_is_not_lost(group, run, tmp_path, monkeypatch) -> None:
    """The commit of step 30 comes between the new owner's listing and its cleanup."""
    group.begin(30)
    listing = Bucket.files_of_sets

    def listing_then_commit(self: Bucket, folder: str) -> dict[str, set[str]]:
        listed = listing(self, folder)
        if group.savers[0].thread is not None:
            monkeypatch.setattr(Bucket, "files_of_sets", listing)
            monkeypatch.setattr(
                stage_checkpoints, "newest_attempt", lambda storage: 1
            )  # it listed the store before the claim
            assert group.finish() is not None
        return listed

    monkeypatch.setattr(Bucket, "files_of_sets", listing_then_commit)
    chosen, _ = start(run, tmp_path / "other", monkeypatch)
    assert_is_step(chosen, 30)


def test_a_torn_upload_is_never_committed(group, run, proxy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 2)
    proxy.fault_of_any = lambda method, path: "torn" if method == "PUT" and "30-000001/rank-00001" in path else None
    assert group.save(30) is None
    assert "rank-00001" in group.savers[0].failure
    assert group.save(40) is not None
    assert_is_step(start(run, tmp_path / "other", monkeypatch)[0], 40)


@pytest.mark.parametrize("file", ["rank-00001.safetensors", "MANIFEST.json"])
def test_flipped_bit_makes_the_previous_checkpoint_load(file, group, run, bucket, tmp_path, monkeypatch) -> None:
    content = bytearray(objects(bucket, run)[key(20, file)])
    bit = random.Random(file).randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    name = f"{run.removeprefix(f's3://{BUCKET}/')}/{key(20, file)}"
    bucket.put_object(Key=name, Body=bytes(content))
    chosen, said = start(run, tmp_path / "other", monkeypatch)
    assert_is_step(chosen, 10)
    assert len(said) == 1
    assert file in said[0]
    assert "trying the previous checkpoint" in said[0]
    assert objects(bucket, run)[key(20, file)] == content, "a person may want to look at it"
    assert key(20, REFUSED) in objects(bucket, run)
    # The upload is not retried.
    chosen, said = start(run, tmp_path / "third", monkeypatch)
    assert_is_step(chosen, 10)
    assert said == []


def test_missing_or_truncated_file_falls_back_to_the_previous_save(group, run, bucket, tmp_path, monkeypatch) -> None:
    prefix = run.removeprefix(f"s3://{BUCKET}/")
    assert group.save(30)
    assert group.save(40)
    bucket.put_object(Key=f"{prefix}/{key(40, 'rank-00001.safetensors')}", Body=b"half")
    bucket.Object(f"{prefix}/{key(30, 'rank-00000.safetensors')}").delete()
    chosen, said = start(run, tmp_path / "other", monkeypatch)
    assert_is_step(chosen, 20)
    assert "4 bytes, expected " in said[0]
    assert "missing files: ['rank-00000.safetensors']" in said[1]


def test_transfer_that_flips_a_bit_is_repeated_and_nothing_set_aside(group, run, tmp_path, monkeypatch) -> None:
    read = Bucket.read_range
    flips = [1]

    def read_badly(self: Bucket, name: str, start: int, stop: int) -> bytes:
        piece = bytearray(read(self, name, start, stop))
        if flips and name.endswith("rank-00001.safetensors"):
            piece[-1] ^= flips.pop()
        return bytes(piece)

    monkeypatch.setattr(Bucket, "read_range", read_badly)
    chosen, said = start(run, tmp_path / "other", monkeypatch)
    assert_is_step(chosen, 20)
    assert said == []
    assert not flips


def test_node_with_a_bad_disk_is_named_and_no_checkpoint_is_set_aside(
    group, run, bucket, tmp_path, monkeypatch
) -> None:
    def gather(values: list[Any], mine: Any) -> None:
        values[:] = [("", "good-node"), mine]

    def keep_badly(self: StageCheckpoints, name: str) -> Path:
        raise CheckpointError("its sha256 is not the manifest's")

    two_nodes = SimpleNamespace(**{**vars(ALONE), "get_world_size": lambda: 2, "all_gather_object": gather})
    monkeypatch.setattr(restore, "dist", two_nodes)
    monkeypatch.setattr(restore.socket, "gethostname", lambda: "bad-node")
    monkeypatch.setattr(StageCheckpoints, "fetch", keep_badly)
    with pytest.raises(CheckpointError, match="bad-node failed to store an intact copy of step-0000000020-000001"):
        choose_together(StageCheckpoints(Bucket(run, tmp_path / "other"), STAGE), 1, print)
    assert key(20, REFUSED) not in objects(bucket, run)


def test_nodes_that_share_their_scratch_fetch_one_after_the_other(group, run, tmp_path) -> None:
    folder = tmp_path / "shared" / STAGE
    (folder / "checkpoints" / "step-0000000010-000001").mkdir(parents=True)
    (folder / "checkpoints" / ".tmp-step-0000000010-000001-rank-00000.safetensors").write_text("of a save")

    def fetch(_: int) -> Path:
        return StageCheckpoints(Bucket(run, folder.parent), STAGE).fetch("step-0000000020-000001")

    with ThreadPoolExecutor(8) as nodes:
        assert list(nodes.map(fetch, range(8))) == [folder / "checkpoints" / "step-0000000020-000001"] * 8


@pytest.mark.slow
def test_saves_and_starts_outlast_a_store_that_fails_often(group, run, proxy, tmp_path, monkeypatch) -> None:
    chance = random.Random(1)
    proxy.fault_of_any = lambda method, path: chance.choice(FLAKY) if chance.random() < 0.2 else None
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 30)
    monkeypatch.setattr(bucket_module, "TIMEOUT_S", 0.5)
    made = savers.WorkerGroup(tmp_path / "run", remote=run)
    assert made.save(30)
    assert made.save(40)
    assert_is_step(start(run, tmp_path / "other", monkeypatch)[0], 40)


def test_unreachable_store_costs_a_save_and_blames_no_checkpoint(group, run, proxy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 2)
    proxy.fault_of_any = lambda method, path: 503
    made = savers.WorkerGroup(tmp_path / "run", remote=run)
    assert made.save(30) is None
    assert "no response after 2 attempts" in made.savers[0].failure
    monkeypatch.setattr(restore, "dist", ALONE)
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoints: .*\n  nothing was changed"):
        choose_together(StageCheckpoints(Bucket(run, tmp_path / "other"), STAGE), 1, print)
    proxy.fault_of_any = lambda method, path: None
    assert made.save(40) is not None
    assert_is_step(start(run, tmp_path / "other", monkeypatch)[0], 40)


def test_after_a_failed_upload_few_other_requests_are_sent(group, proxy) -> None:
    """Without the store every request takes a minute, and a run with a stop request waits for each of them."""
    group.checkpoints.storage.retry.attempts = 10
    asked: list[str] = []

    def refuse(method: str, path: str) -> int:
        asked.append(path)
        return 503

    proxy.fault_of_any = refuse
    assert group.save(30) is None
    failure = group.savers[0].failure
    assert "rank-00000.safetensors: no response after 10 attempts" in failure
    assert "rank-00001" in failure
    of_files = [path for path in asked if "/rank-0000" in path]
    assert len(of_files) == 20
    assert len(asked) <= 23


def test_stop_sends_no_requests_to_a_lost_store(group, run, proxy, tmp_path, monkeypatch) -> None:
    stops: list[str] = []  # reason for the driver's stop
    asked: list[str] = []

    def refuse(method: str, path: str) -> int:
        asked.append(path)
        return 503

    def end_as_asked(*_: Any, **options: Any) -> None:
        proxy.fault_of_any = refuse
        stops.append("SIGTERM")
        raise WorkerGroupError(0, "n1", "Preempted: stopped at step 30", exit_code=75, kind="Preempted")

    monkeypatch.setattr(supervisor.WorkerGroup, "run", end_as_asked)
    with pytest.raises(Preempted, match=r"^stopped at step 30$"):
        supervise(run, tmp_path / "run", stops)
    assert asked == []


def supervise(url: str, run: Path, stops: Sequence[str]) -> None:
    """Run attempts of a stage with checkpoints at `url`; end it as soon as a stop is requested."""
    cluster = ClusterConfig(backend="processes")
    context = pretrain_context(run, cluster, remote=url, stop_requested=lambda: bool(stops))
    supervisor.supervise(print, lambda attempt: {}, context, worlds=(1,), stall_s=60.0)


def test_cause_of_a_worker_failure_is_recorded_even_without_the_store(group, run, proxy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 2)

    def fail(*_: Any, **options: Any) -> None:
        proxy.fault_of_any = lambda method, path: 503
        raise WorkerGroupError(0, "n1", "OSError: no more", "Traceback of worker 0", kind="OSError")

    monkeypatch.setattr(supervisor.WorkerGroup, "run", fail)
    with pytest.raises(StorageError):
        supervise(run, tmp_path / "run", [])
    (incidents,) = [path.read_text() for path in (tmp_path / "run").glob("*/incidents.txt")]
    assert "worker 0 on n1: OSError: no more\nTraceback of worker 0\n" in incidents


def test_a_commit_whose_answer_is_lost_is_a_commit(group, run, proxy, tmp_path, monkeypatch) -> None:
    faults = iter(["deaf"])
    proxy.fault_of_any = lambda method, path: next(faults, None) if path.endswith("30-000001/MANIFEST.json") else None
    assert group.save(30) is not None
    assert_is_step(start(run, tmp_path / "other", monkeypatch)[0], 30)


def test_a_commit_whose_answers_are_lost_outlives_a_save_of_the_same_step(
    group, run, proxy, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 2)
    group.checkpoints.storage.retry.attempts = 2
    proxy.fault_of_any = lambda method, path: "deaf" if path.endswith("30-000001/MANIFEST.json") else None
    assert group.save(30) is None
    assert "no response after 2 attempts" in group.savers[0].failure
    proxy.fault_of_any = lambda method, path: 503 if method == "PUT" and "30-000001/rank-00001" in path else None
    assert group.save(30) is None
    assert "rank-00001" in group.savers[0].failure
    proxy.fault_of_any = lambda method, path: None
    assert_is_step(start(run, tmp_path / "other", monkeypatch)[0], 30)


def test_old_checkpoints_are_deleted_and_an_interrupted_save_is_swept(run, bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    claim_attempt(Bucket(run, SCRATCH))
    made = savers.WorkerGroup(tmp_path / "run", remote=run, keep=2)
    for step in (10, 20, 30):
        assert made.save(step)
    made.begin(40)  # and then it is killed
    files = ("MANIFEST.json", "rank-00000.safetensors", "rank-00001.safetensors")
    kept = {key(step, file) for step in (20, 30) for file in files}
    died = {key(40, "rank-00000.safetensors"), key(40, "rank-00001.safetensors")}
    assert objects(bucket, run).keys() == {"attempts/000001.json", *kept, *died}
    start(run, tmp_path / "other", monkeypatch)
    markers = {key(40, "MANIFEST.json"), key(40, SWEPT)}
    assert objects(bucket, run).keys() == {"attempts/000001.json", "attempts/000002.json", *kept, *markers}


def test_pruning_keeps_milestones_and_at_least_two_checkpoints(group, run, tmp_path) -> None:
    assert group.save(30)
    assert group.save(40)
    assert group.save(50)
    deleted = StageCheckpoints(Bucket(run, tmp_path / "run"), STAGE).prune(keep=1, keep_every=20)
    assert deleted == ["step-0000000030-000001", "step-0000000010-000001"]
    assert committed_steps(run) == [50, 40, 20]


def test_interrupted_deletion_leaves_no_checkpoint_without_its_files(group, run, bucket, tmp_path, monkeypatch) -> None:
    assert group.save(30)
    delete = Bucket.delete
    calls: list[Any] = []

    def delete_once(self: Bucket, names: Any) -> None:
        calls.append(names)
        if len(calls) > 1:
            raise StorageError("the store is gone")
        delete(self, names)

    monkeypatch.setattr(Bucket, "delete", delete_once)
    with pytest.raises(StorageError):
        StageCheckpoints(Bucket(run, tmp_path / "run"), STAGE).prune(keep=2, keep_every=0)
    assert committed_steps(run) == [30, 20]
    monkeypatch.setattr(Bucket, "delete", delete)
    assert_is_step(start(run, tmp_path / "other", monkeypatch)[0], 30)
    left = {name for name in objects(bucket, run) if "step-0000000010" in name}
    assert left == {key(10, "MANIFEST.json"), key(10, SWEPT)}, "the next attempt clears up"


def test_start_of_an_outdated_attempt_changes_nothing(group, run, bucket, tmp_path) -> None:
    group.begin(30)
    assert [claim_attempt(Bucket(run, SCRATCH)), claim_attempt(Bucket(run, SCRATCH))] == [2, 3]
    before = objects(bucket, run)
    with pytest.raises(
        RunOwned, match=r"attempt 3 now owns .*; this process is attempt 2\n  the newer attempt's files"
    ):
        StageCheckpoints(Bucket(run, tmp_path / "other"), STAGE).choose(2, print)
    assert objects(bucket, run) == before


# ------------------------------------------------------------------------ a run's small files, and its owner


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the local folders of one run on two machines; an owner renews its lease five times a second."""
    monkeypatch.setattr(ownership, "PERIOD_S", 0.2)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    return folders


@contextmanager
def synced(store: Bucket, log: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Run a command's lease and synchronisation of its folder with the store."""
    with Lease(store, log) as lease, sync.synced(store, lease, log) as put:
        yield put


def left_elsewhere(run: str, folder: Path) -> Lease:
    """Write the lease of a command on another machine that no longer renews it."""
    folder.mkdir(exist_ok=True)
    lease = Lease(Bucket(run, folder), print)
    lease.record["machine"] = "another"
    lease.take()
    return lease


def files_of(folder: Path) -> dict[str, str]:
    """Return the small files of a run's local folder by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "sync.json"]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_small_files_go_from_machine_to_machine_and_scratch_stays(run, machines, bucket) -> None:
    with synced(Bucket(run, machines[0]), print) as put:
        (machines[0] / "stage" / "checkpoints").mkdir(parents=True)
        (machines[0] / "stage" / "checkpoints" / "rank-00000.safetensors").write_text("scratch")
        (machines[0] / "stage" / ".tmp-1-2-done.json").write_text("half")
        (machines[0] / "stage" / "done.json").write_text("done")
        put()
        claim_attempt(Bucket(run, SCRATCH), "stage")
        (machines[0] / "log.txt").write_text("the last line\n")
    (machines[1] / "stage").mkdir()
    (machines[1] / "stage" / "done.json").write_text("of an older owner")
    said: list[str] = []
    with synced(Bucket(run, machines[1]), said.append):
        assert files_of(machines[1]) == {"stage/done.json": "done", "log.txt": "the last line\n"}
        assert (machines[1] / "stage" / "attempts" / "attempt-000001").is_dir()
        (machines[1] / "log.txt").write_text("the last line\nand one more\n")
    assert said == [], "an owner that has said that it ends is not waited for"
    assert objects(bucket, run)["log.txt"] == b"the last line\nand one more\n"


def test_files_not_uploaded_before_a_kill_remain_in_the_same_folder(run, machines) -> None:
    killed = left_elsewhere(run, machines[0])
    sync.Sync(killed.storage, killed, print).note()
    (machines[0] / "log.txt").write_text("never put\n")
    said: list[str] = []
    with synced(Bucket(run, machines[0]), said.append):
        assert (machines[0] / "log.txt").read_text() == "never put\n"
        assert Bucket(run, SCRATCH).read("log.txt") == b"never put\n", "workers on other nodes may need it"
    assert said[-1].endswith(" has not renewed its lease, and can no longer commit")


def test_frozen_owner_is_replaced_and_uploads_nothing_when_it_wakes_up(run, machines, bucket) -> None:
    said: list[str] = []
    frozen = left_elsewhere(run, machines[0])
    (machines[0] / "log.txt").write_text("of the frozen one")
    with synced(Bucket(run, machines[1]), said.append):
        assert "has not renewed its lease" in said[-1]
        (machines[1] / "log.txt").write_text("of the new one")
        with pytest.raises(RunOwned):
            sync.Sync(Bucket(run, machines[0]), frozen, print).put()
    assert objects(bucket, run)["log.txt"] == b"of the new one"


def test_fetched_weights_are_those_of_their_record_or_are_fetched_again(run, bucket, tmp_path, monkeypatch) -> None:
    made = tmp_path / "made" / "stage"
    made.mkdir(parents=True)
    (made / "model.json").write_text("{}")
    (made / "weights.safetensors").write_bytes(b"good weights")
    artifacts.write_record(made / "done.json", {"files": artifacts.digests(made)})
    for path in made.iterdir():
        Bucket(run, SCRATCH).put_file(f"stage/{path.name}", path)

    # A node has a corrupt copy of the right size, and class names of other weights.
    node = tmp_path / "node"
    (node / "stage").mkdir(parents=True)
    (node / "stage" / "weights.safetensors").write_bytes(b"baad weights")
    (node / "stage" / "classes.json").write_text("[]")
    artifacts.fetch_weights(Bucket(run, node), "stage")
    assert files_of(node) == files_of(made.parent)

    # A transfer flips a bit once; then the object itself is bad, and the good file is not replaced.
    fetch = Bucket.fetch
    flips = [b"baad weights"]

    def fetch_badly(self: Bucket, name: str, file: Path, size: int) -> None:
        fetch(self, name, file, size)
        if flips:
            file.write_bytes(flips.pop())

    records = artifacts.digests(made, ["weights.safetensors"])
    monkeypatch.setattr(Bucket, "fetch", fetch_badly)
    other = tmp_path / "other" / "stage"

    def fetch_weights() -> None:
        for name, record in records.items():
            Bucket(run, other.parent).ensure_local(f"stage/{name}", record["bytes"], record["sha256"])

    fetch_weights()
    assert (other / "weights.safetensors").read_bytes() == b"good weights"
    assert not flips
    Bucket(run, SCRATCH).put("stage/weights.safetensors", b"baad weights")
    fetch_weights()
    (other / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors has changed: its sha256 differs"):
        fetch_weights()
    assert list(other.iterdir()) == [], "a bad copy would be put by the driver"


def test_record_of_a_finished_stage_is_uploaded_after_its_files_and_not_after_a_takeover(
    run, machines, bucket, monkeypatch
) -> None:
    monkeypatch.setattr(ownership, "PERIOD_S", 1000.0)  # the thread does nothing meanwhile
    put_file = Bucket.put_file
    names: list[str] = []

    def put_one(self: Bucket, name: str, file: Path) -> None:
        put_file(self, name, file)
        names.append(name)
        if len(names) == 15:
            assert Bucket(run, SCRATCH).create_once("leases/000002.json", b"of a new owner")

    with pytest.raises(RunOwned), synced(Bucket(run, machines[0]), print) as put:
        monkeypatch.setattr(Bucket, "put_file", put_one)
        (machines[0] / "stage").mkdir()
        for name in ("done.json", *(f"weights-{number}" for number in range(9))):
            (machines[0] / "stage" / name).write_text("first")
        put()
        assert len(names) == 10
        assert names[-1] == "stage/done.json"
        for number in range(9):
            (machines[0] / "stage" / f"weights-{number}").write_text("second time")
        put()
    assert len(names) == 15
    assert list(objects(bucket, run).values()).count(b"second time") == 5


# ------------------------------------------------------------------------ commands


def test_status_and_checkpoints_read_a_run_in_a_store(group, run, bucket, tmp_path, capsys) -> None:
    folder = Bucket(run, SCRATCH)
    prefix = run.removeprefix(f"s3://{BUCKET}/")
    folder.put("status.json", json.dumps({"exit_code": 75, "message": "stopped at step 20", "time": "noon"}).encode())
    folder.put(f"{STAGE}/stage.json", seal({"started": 1.0}).encode())
    record = {"kind": "train", "time": 1.0, "attempt": 1, "step": 20, "steps": 90, "loss": 2.5, "images_per_s": 7.0}
    record |= {"eta_s": 3.0, "seconds": 1.0, "losses": [2.5], "stalled_s": 0.0, "evaluated_s": 0.0}
    record |= {"wait": 0.0, "world": 2}
    folder.put(f"{STAGE}/metrics.jsonl", f"{json.dumps(record)}\n".encode())
    assert main(["status", run]) == 0
    said = capsys.readouterr().out
    assert f"run  {run}\nend  stopped at step 20 (exit 75, noon)\n" in said
    assert "step 20/90  loss 2.5000" in said
    assert "last checkpoint step 20" in said

    group.begin(30)
    assert main(["checkpoints", "list", run]) == 0
    said = capsys.readouterr().out
    assert "step-0000000020-000001" in said
    assert "world 2  ZeRO 2  attempt 1  ledger 000000000000" in said
    assert ".tmp-0000000030-000001  uncommitted save, in progress or interrupted" in said
    assert "step-0000000030" not in said

    bucket.put_object(Key=f"{prefix}/{key(20, 'rank-00001.safetensors')}", Body=b"half")
    assert main(["checkpoints", "verify", f"{run}/{STAGE}"]) == 74
    said = capsys.readouterr().out
    assert f"step-0000000020-000001  DAMAGED: {run}/{key(20, 'rank-00001.safetensors')} has 4 bytes" in said
    assert "step-0000000010-000001  intact" in said
    # A bad checkpoint must not cause the deletion of a good one.
    assert main(["checkpoints", "prune", run]) == 74
    assert committed_steps(run) == [20, 10]
    assert group.finish()
    assert group.save(40)
    assert group.save(50)
    capsys.readouterr()
    assert main(["checkpoints", "prune", run, "--keep", "2"]) == 0
    assert committed_steps(run) == [50, 40]
    assert f"{STAGE}: step-0000000020-000001 deleted" in capsys.readouterr().out


def test_commands_that_read_folders_name_what_to_type(run, capsys) -> None:
    assert main(["replay", run, "step=3"]) == 64
    assert f"aws s3 sync {run} runs/NAME" in capsys.readouterr().err
    assert main(["status", run]) == 64
    assert f"no run at {run}" in capsys.readouterr().err


def test_pack_stage_of_a_run_in_an_object_store_is_refused(run, tmp_path, capsys) -> None:
    assert main(["plan", "digits", f"run={run}", f"cluster.scratch={tmp_path}"]) == 78
    said = capsys.readouterr().err
    assert f"shards is a pack stage, but run is {run}" in said
    assert "python -m jobs index s3://BUCKET/SET" in said
