"""Complete runs in an object store, with an empty disk on every machine: the result equals that of a run in a folder.

Drivers are real processes with separate local folders, as if on different machines. The store is moto on loopback;
a proxy in front of it injects faults.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.bucket import Bucket
from data.errors import DataError
from jobs.run.sync import fetch_small_files
from tests.support import hosts
from tests.support.ray_hosts import Driver, RayHosts
from tests.support.recipes import SMALL, without_check
from tests.support.stores import Proxy, store

ROOT = Path(__file__).parents[3]
AFTER = without_check("""
resize: {{init: "@pretrain", image_size: 24}}
finetune:
  init: "@resize"
  data: {{train: {shards}/train}}
  optim: {{lr: 0.05, schedule: {{warmup_steps: 2}}}}
  loss: softmax
  steps: 4
  passes: null
  batch_size: 16
  micro_batch: 8
  precision: fp32
  zero: 0
""")
RUN = "s3://images/runs/{name}"


def recipe_on(shards: Path) -> str:
    """SMALL on existing shards, because a run in a store cannot pack; with two more stages."""
    pretrain = "".join(line for line in SMALL.splitlines(True) if not line.startswith("shards:"))
    return pretrain.replace("@shards", str(shards)) + AFTER.lstrip().format(shards=shards)


@pytest.fixture
def small(tmp_path: Path, shards: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(recipe_on(shards))
    return path


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with store("s3", {}) as made:
        yield made


@pytest.fixture
def drive(small: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `python -m jobs run` on a named machine with a separate disk; its output is in NAME.log."""
    started = []

    def start(machine: str, *overrides: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "jobs", "run", str(small), f"cluster.scratch={tmp_path / machine}", *overrides]
        with open(tmp_path / f"{machine}.log", "ab") as log:
            driver = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        started.append(driver)
        return driver

    yield start
    for driver in started:
        if driver.poll() is None:
            driver.send_signal(signal.SIGCONT)
            driver.kill()
            driver.wait()


def outcome(folder: Path) -> dict[str, Any]:
    """Return the results of a finished run: its weights, ledger, and the bytes of its last checkpoint."""
    made: dict[str, Any] = {}
    for stage in ("pretrain", "resize", "finetune"):
        (directory,) = folder.glob(f"{stage}-*")
        made[stage] = json.loads((directory / "done.json").read_text())["files"]["weights.safetensors"]
        assert len((directory / "weights.safetensors").read_bytes()) == made[stage]["bytes"]
    (directory,) = folder.glob("pretrain-*")
    made["ledger"] = json.loads((directory / "done.json").read_text())["ledger"]
    newest = sorted((directory / "checkpoints").glob("step-*"))[-1]
    for file in sorted(newest.glob("rank-*")):
        made[file.name] = file.read_bytes()
    return made


def losses(folder: Path) -> list[float]:
    """Return the loss of every pretraining step, from the last attempt that took the step."""
    by_step = {}
    (path,) = folder.glob("pretrain-*/metrics.jsonl")
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            first = record["step"] - len(record["losses"]) + 1
            by_step.update(dict(enumerate(record["losses"], first)))
    return [by_step[step] for step in sorted(by_step)]


def folder_of(machine: Path) -> Path:
    """Return the run's local folder on a machine."""
    (folder,) = machine.iterdir()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_killed_during_a_save_resumes_on_another_machine_with_the_same_bits(proxy, drive, tmp_path) -> None:
    """Requests keep failing: status 503 and 500, and lost, truncated or late answers."""
    run = RUN.format(name="killed")
    assert drive("local", f"run={tmp_path / 'run'}").wait(300) == 0
    first = drive("one", f"run={run}")

    def kill(method: str, path: str) -> int | None:
        if method == "PUT" and "step-0000000020-000001/rank-00001" in path:
            first.kill()
            return 503
        return None

    proxy.fault_of_any = kill
    assert first.wait(300) == -signal.SIGKILL
    shutil.rmtree(tmp_path / "one")

    chance = random.Random(0)
    proxy.fault_of_any = lambda *request: chance.choice([500, 503, "deaf", "stall"]) if chance.random() < 0.1 else None
    proxy.fault = lambda path: chance.choice([500, "short"]) if chance.random() < 0.1 else None
    assert drive("two", f"run={run}").wait(600) == 0
    said = (tmp_path / "two.log").read_text()
    assert "taking over the run: process " in said
    assert "attempt 2: resumed from step 15 (attempt 1, 2 workers" in said
    assert outcome(folder_of(tmp_path / "two")) == outcome(tmp_path / "run")
    assert losses(folder_of(tmp_path / "two")) == losses(tmp_path / "run")

    # A third machine has nothing but the store.
    proxy.fault_of_any = lambda method, path: None
    proxy.fault = lambda path: None
    assert drive("three", f"run={run}").wait(300) == 0
    assert (tmp_path / "three.log").read_text().count("skipped, finished with the same config") == 3
    log = (folder_of(tmp_path / "three") / "log.txt").read_text()
    assert log.startswith((folder_of(tmp_path / "two") / "log.txt").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stopped_run_resumes_on_another_machine_at_once(proxy, drive, tmp_path) -> None:
    run = RUN.format(name="stopped")
    longer = ("pretrain.steps=300", "pretrain.save_every=50")
    assert drive("local", f"run={tmp_path / 'run'}", *longer).wait(300) == 0
    first = drive("one", f"run={run}", *longer)
    wait_for(tmp_path / "one.log", "checkpoint step 50 committed")
    first.terminate()
    assert first.wait(300) == 75
    assert drive("two", f"run={run}", *longer).wait(300) == 0
    said = (tmp_path / "two.log").read_text()
    assert "resumed from step" in said
    assert "lease renewal" not in said
    assert outcome(folder_of(tmp_path / "two")) == outcome(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_second_owner_is_refused_and_a_frozen_owner_cannot_commit(proxy, drive, tmp_path) -> None:
    run = RUN.format(name="two")
    longer = ("pretrain.steps=1000", "pretrain.save_every=20", "pretrain.keep=4")
    assert drive("local", f"run={tmp_path / 'run'}", *longer).wait(300) == 0
    first = drive("one", f"run={run}", *longer)
    wait_for(tmp_path / "one.log", "checkpoint step 20 committed")

    # While the first is alive, the second is refused, and names the first.
    assert drive("two", f"run={run}", *longer).wait(300) == 73
    assert f"{run} is owned by process {first.pid} on" in (tmp_path / "two.log").read_text()
    assert first.poll() is None, "the first ended too early for this test"

    # The first freezes with its workers, and the second takes over and finishes the run.
    frozen = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for process in frozen:
        process.suspend()
    assert drive("two", f"run={run}", *longer).wait(600) == 0
    for process in frozen:
        process.resume()
    # Neither 74 (a failed commit) nor 75 (stopped), after which a batch system would restart the command.
    assert first.wait(300) == 73
    assert f"{run} was taken over by process" in (tmp_path / "one.log").read_text()
    assert "which has ended since" in (tmp_path / "one.log").read_text()
    assert outcome(folder_of(tmp_path / "two")) == outcome(tmp_path / "run")

    # The store is unchanged since the second ended.
    assert drive("three", f"run={run}", *longer).wait(300) == 0
    assert (tmp_path / "three.log").read_text().count("skipped, finished with the same config") == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("renewed_after_s", [5.0, math.inf])
def test_credentials_that_expire_during_a_run_are_named_or_renewed(renewed_after_s, proxy, drive, tmp_path) -> None:
    driver = drive("one", f"run={RUN.format(name='expired')}", "pretrain.micro_batch=1", "pretrain.log_every=1")
    wait_for(tmp_path / "one.log", "checkpoint step 10 committed")
    expired = time.monotonic()
    proxy.fault_of_any = lambda method, path: (
        (400, "ExpiredToken") if time.monotonic() < expired + renewed_after_s else None
    )
    exit_code = driver.wait(600)
    seconds = time.monotonic() - expired
    said = (tmp_path / "one.log").read_text()
    print(f"exit code {exit_code} after {seconds:.0f} s\n{said}")
    if renewed_after_s == math.inf:
        assert exit_code in (69, 74)
        assert "denied after" in said
        assert "ExpiredToken; the credentials have expired: renew them" in said
        assert seconds < 240, "30 s for the first denied request, at most a few for each other one"
    else:
        assert exit_code == 0
        assert "FAILED" not in said


CREDENTIALS = """
mkdir -p ~/.aws
printf '[default]\\nregion = us-east-1\\nendpoint_url = http://store:5000\\n' >~/.aws/config
printf '[default]\\naws_access_key_id = key\\naws_secret_access_key = very-secret\\n' >~/.aws/credentials
"""
BUCKET = "import boto3; boto3.client('s3').create_bucket(Bucket='images')"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing())
def test_run_on_hosts_without_shared_storage_survives_a_lost_host(small, shards, drive, tmp_path) -> None:
    """Three hosts of a Ray cluster, which share only the sets and the store (a fourth host)."""
    # Every host has a separate /tmp, and sees only this test's folder.
    shutil.copytree(shards, tmp_path / "sets")
    small.write_text(recipe_on(tmp_path / "sets"))
    run = RUN.format(name="hosts")
    slower = ("pretrain.micro_batch=1", "pretrain.log_every=1")
    reference = drive("local", f"run={tmp_path / 'run'}", *slower)
    with RayHosts(tmp_path, ["h0", "h1", "h2"]) as cluster:
        network = cluster.network
        assert reference.wait(600) == 0
        with (tmp_path / "store.log").open("w") as log:
            network.boot("store").start("python -m moto.server -H 0.0.0.0 -p 5000", log)
        for name in cluster.names:
            network[name].run(CREDENTIALS)
        wait_for(tmp_path / "store.log", "Running on")
        cluster.head.run(["python", "-c", BUCKET])

        words = [str(small), f"run={run}", "cluster.backend=ray", "cluster.scratch=/tmp/scratch", *slower]
        driver = Driver(cluster, words, tmp_path / "driver")
        driver.until(lambda: "checkpoint step 10 committed" in driver.output, 300)
        network[worker_host(cluster)].kill()
        assert driver.wait(600) == 0, driver.output
        print(driver.output)
        assert "restarting from step" in driver.output
        assert "attempt 2: resumed from step" in driver.output
        cluster.head.run(f"cp -r /tmp/scratch {tmp_path}/head")
        made = outcome(folder_of(tmp_path / "head"))
        expected = outcome(tmp_path / "run")
        # The last checkpoint is in the store; this is the one from which this host resumed.
        for name in ("pretrain", "resize", "finetune", "ledger"):
            assert made[name] == expected[name]
        assert losses(folder_of(tmp_path / "head")) == losses(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing())
def test_run_is_taken_over_from_a_driver_with_a_dead_link_which_then_ends_with_73(small, shards, tmp_path) -> None:
    """Two hosts, and their store on a third; network frames are dropped, so that no connection is closed."""
    shutil.copytree(shards, tmp_path / "sets")
    small.write_text(recipe_on(tmp_path / "sets"))
    run = RUN.format(name="link")
    with hosts.Network(tmp_path) as network:

        def log_of(name: str) -> Path:
            return tmp_path / f"{name}.log"

        def start(name: str, *words: str) -> subprocess.Popen[bytes]:
            with log_of(name).open("a") as log:
                return network[name].start(["python", "-m", *words], log, OMP_NUM_THREADS="1")

        def drive(name: str) -> subprocess.Popen[bytes]:
            longer = ("pretrain.steps=3000", "pretrain.save_every=20")
            return start(name, "jobs", "run", str(small), f"run={run}", "cluster.scratch=/tmp/scratch", *longer)

        for name in ("store", "h0", "h1"):
            network.boot(name).run(CREDENTIALS)
        start("store", "moto.server", "-H", "0.0.0.0", "-p", "5000")
        wait_for(log_of("store"), "Running on")
        network["h0"].run(["python", "-c", BUCKET])
        first = drive("h0")
        wait_for(log_of("h0"), "checkpoint step 20 committed")
        assert "now  running, started 20" in (told := network["h1"].run(f"python -m jobs status {run}")), told

        network["h0"].black_hole()
        began = time.monotonic()
        told = network["h1"].run(f"python -m jobs status {run}")
        print(f"load {os.getloadavg()[0]:.0f}: status took {time.monotonic() - began:.1f} s: {told}")
        assert "end  ended unexpectedly: process " in told
        assert " on h0, started 20" in told
        assert "(that machine's clock); to resume, run python -m jobs run " in told
        second = drive("h1")
        wait_for(log_of("h1"), "taking over the run: process ")
        wait_for(log_of("h1"), "attempt 2: resumed from step ")

        network["h0"].mend()
        began = time.monotonic()
        assert first.wait(240) == 73, log_of("h0").read_text()
        print(f"mended: the first driver ended after {time.monotonic() - began:.1f} s")
        assert "error: s3://images/runs/link is owned by process " in log_of("h0").read_text()
        # The second was not disturbed, and ends on request from the other host.
        assert second.poll() is None
        told = network["h0"].run(f"python -m jobs stop {run}")
        assert second.wait(120) == 75, log_of("h1").read_text()
        assert "the command has ended; for its result, run " in told, log_of("h1").read_text()
        assert log_of("h1").read_text().count("attempt ")
        assert "restarting" not in log_of("h1").read_text()


def worker_host(cluster: RayHosts) -> str:
    """Return a host, other than the head, on which a worker of the current attempt runs."""
    said = cluster.head.run("cat /tmp/scratch/*/pretrain-*/attempts/attempt-*/rank-*.json")
    for name in cluster.names[1:]:
        if f'"node": "{name}"' in said:
            return name
    raise AssertionError(said)


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    "key", ["../outside.json", "pretrain//status.json", "/status.json", f"pretrain/{300 * 'x'}", "../../etc/\u202ecron"]
)
def test_hostile_object_names_write_nothing_on_this_machine(key, tmp_path: Path, proxy: Proxy) -> None:
    import boto3

    boto3.client("s3").put_object(Bucket="images", Key=f"runs/hostile/{key}", Body=b"attack")
    local = tmp_path / "scratch" / "run"
    local.mkdir(parents=True)
    with pytest.raises(DataError, match="unsafe name") as error:
        fetch_small_files(Bucket("s3://images/runs/hostile", local), lambda name: True)
    assert str(error.value).isprintable() or "\u202e" not in str(error.value), "no character that turns the line around"
    assert list((tmp_path / "scratch").rglob("*")) == [local]


@pytest.mark.parametrize("stage", ["../../outside", "/abs/outside", "a/b", "..", "a\0b", 7])
def test_hostile_stage_in_a_claim_makes_no_folder_outside_the_run(stage, tmp_path: Path, proxy: Proxy) -> None:
    local = tmp_path / "scratch" / "run"
    local.mkdir(parents=True)
    run = Bucket("s3://images/runs/claims", local)
    run.put("attempts/000001.json", json.dumps({"stage": stage}).encode())
    with pytest.raises(DataError, match=r"attempts/000001\.json: unsafe name"):
        fetch_small_files(run, lambda name: True)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(("outside", "b", "attempt-"))]


def test_claim_that_is_not_json_is_reported_with_its_name(tmp_path: Path, proxy: Proxy) -> None:
    run = Bucket("s3://images/runs/torn", tmp_path)
    run.put("attempts/000001.json", b"[]")
    with pytest.raises(DataError, match=r"attempts/000001\.json is damaged: expected JSON"):
        fetch_small_files(run, lambda name: False)


@pytest.mark.parametrize("listed", [3, 6, 90])
def test_file_replaced_after_the_listing_arrives_whole(
    listed: int, tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running command replaces small files, such as examples.json, while another command downloads them."""
    run = Bucket("s3://images/runs/live", tmp_path, attempts=2)
    run.put("pretrain/examples.json", b"[1, 2]")
    monkeypatch.setattr(run, "list", lambda: {"pretrain/examples.json": listed})
    fetch_small_files(run, lambda name: True)
    assert (tmp_path / "pretrain" / "examples.json").read_bytes() == b"[1, 2]"
