"""Campaigns across several simulated hosts: a host dies, or its link is cut, slow or repaired.

Ray runs on three hosts (tests/support/hosts.py), started with the README's commands. Each host has one processor, so
that a campaign of two workers uses two hosts and one is spare. The first host is the head, on which the driver runs.
"""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.checkpoints.manifest import committed, read_manifest
from pipeline.monitoring.telemetry import Record, read_metrics
from tests.support import hosts
from tests.support.drives import assert_same, assert_same_stage, output_of, stage, start
from tests.support.hosts import ROOT, Host, Network
from tests.support.ray_hosts import (
    PATIENCE,
    POLL_S,
    START_TIMEOUT_S,
    Driver,
    RayHosts,
    a_worker_host,
    has_reported,
    is_saving,
    newest_nodes,
)
from tests.support.recipes import SMALL

pytestmark = pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing())

SEED = int(os.environ.get("FAULT_SEED", "20261122"))
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "20"))
# Each step is reported at once, and is long enough to inject a fault.
OVERRIDES = ["pretrain.log_every=1", "pretrain.micro_batch=1"]
ONCE = pytest.param(1, marks=pytest.mark.timeout(900))
LONG = pytest.param(ROUNDS, marks=pytest.mark.timeout(7200))
HALF = pytest.param(ROUNDS // 2, marks=pytest.mark.timeout(7200))  # for faults with ten rounds in the table, not 20
QUARTER = pytest.param(ROUNDS // 4, marks=pytest.mark.timeout(7200))
NOTICED_S = 20.0  # the documented limit is 10 s, on an otherwise idle machine
AGAIN_S = 150.0  # for a new attempt: placing and importing, on two cores that carry three hosts


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the storage shared by all hosts."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def both(shared: Path) -> Iterator[tuple[RayHosts, Path]]:
    """Start the cluster, and meanwhile train the undisturbed run without Ray and hosts."""
    twin = shared / "twin"
    process = start(twin, *OVERRIDES)
    with RayHosts(shared, ["h0", "h1", "h2"]) as cluster:
        process.join()
        assert process.exitcode == 0, output_of(twin)
        yield cluster, twin


@pytest.fixture
def twin(both: tuple[RayHosts, Path]) -> Path:
    return both[1]


@pytest.fixture
def cluster(both: tuple[RayHosts, Path]) -> RayHosts:
    """Return the cluster with all its hosts restored after the previous test."""
    cluster = both[0]
    dead = [name for name in cluster.names if not psutil.pid_exists(cluster.network[name].init)]
    if dead:
        cluster.join(*dead)
    return cluster


def begin(cluster: RayHosts, run: Path, *overrides: str) -> Driver:
    """Start the small campaign on the cluster."""
    recipe = run.with_suffix(".yaml")
    recipe.write_text(SMALL)
    return cluster.campaign(recipe, run, *OVERRIDES, *overrides)


def has_printed(driver: Driver, text: str) -> Callable[[], bool]:
    """Return a function that tells whether the driver has printed the text."""
    return lambda: text in driver.output


def go_on(driver: Driver, attempt: int) -> tuple[float, float]:
    """Wait until the next attempt trains; return the seconds to the fault's detection, and from there to training."""
    noticed_s = driver.until(lambda: driver.output.count("restarting from") >= attempt - 1, AGAIN_S)
    again_s = driver.until(has_printed(driver, f"attempt {attempt}: "), AGAIN_S)
    return noticed_s, again_s


def verdict(driver: Driver) -> str:
    """Return the relevant part of the driver's last line about an ended attempt: rank, host and cause."""
    lines = [line for line in driver.output.splitlines() if "restarting from" in line]
    return lines[-1][:100]


def verdict_or_none(driver: Driver) -> str:
    """Return the verdict, or a text if there is none."""
    return verdict(driver) if "restarting from" in driver.output else "no verdict"


# ------------------------------------------------------------------------ hosts


def test_a_host_has_a_name_an_address_and_memory_of_its_own_and_shares_what_it_should(tmp_path) -> None:
    x = f"x-{os.getpid()}"  # other tests may run on this machine
    with Network(tmp_path) as network:
        first, second = network.boot("one"), network.boot("two")
        assert first.run("hostname").strip() == "one" != os.uname().nodename
        first.run(f"touch /dev/shm/{x} /tmp/{x} {tmp_path}/{x}")
        assert second.run(f"ls /dev/shm /tmp/{x} {tmp_path}/{x} || true").count(x) == 2, "one error, one shared file"
        assert not Path("/dev/shm", x).exists()
        assert not Path("/tmp", x).exists()
        assert f"{second.address} two" in first.run("getent hosts two").replace("      ", " ")
        assert first.run([sys.executable, "-c", "import jobs; print(jobs.__file__)"]).startswith(str(ROOT))


ECHO = "import socket; s = socket.create_server(('', 5000)); c, _ = s.accept()\nwhile True: c.sendall(c.recv(9))"
ASK = """
import socket, sys, time
c = socket.create_connection(('two', 5000), timeout=5)
for line in sys.stdin:
    began = time.monotonic()
    c.settimeout(float(line))
    try:
        c.sendall(b'x')
        c.recv(9)
        print('answered', time.monotonic() - began, flush=True)
    except TimeoutError:
        print('silence', flush=True)
"""


def test_link_can_be_cut_slowed_and_restored_or_drop_all_packets(tmp_path) -> None:
    fifo = tmp_path / "ask"
    os.mkfifo(fifo)
    with Network(tmp_path) as network, (tmp_path / "answers").open("w") as answers:
        first, second = network.boot("one"), network.boot("two")
        second.start([sys.executable, "-c", ECHO], answers)
        time.sleep(0.5)
        first.start(["sh", "-c", f'exec {sys.executable} -c "$1" <{fifo}', "sh", ASK], answers)
        count = 0
        with fifo.open("w") as asking:

            def ask(patience_s: float) -> str:
                nonlocal count
                print(patience_s, file=asking, flush=True)
                count += 1
                deadline = time.monotonic() + 20
                while len((tmp_path / "answers").read_text().splitlines()) < count:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                return (tmp_path / "answers").read_text().splitlines()[-1]

            assert ask(5).startswith("answered")
            second.slow(delay_s=0.4, loss=0.0, seed=SEED)
            assert 0.4 <= float(ask(5).removeprefix("answered")) < 2
            second.mend()
            assert float(ask(5).removeprefix("answered")) < 0.3
            second.cut()
            assert ask(1) == "silence"
            assert "NO-CARRIER" in second.run("ip link show eth0")
            second.mend()
            second.black_hole()
            assert ask(1) == "silence"
            assert "NO-CARRIER" not in second.run("ip link show eth0")


OWNER = """
import sys, time
from pathlib import Path
from tests.support.hosts import Network
network = Network(Path(sys.argv[1]))
for name in ("one", "two"):
    network.boot(name).start("sleep 1000", sys.stderr)
network["two"].slow(0.1, 0.0, 1)
print("booted", flush=True)
time.sleep(1000)
"""


def test_hosts_end_with_the_process_that_booted_them_even_if_it_is_killed(tmp_path) -> None:
    links = subprocess.check_output(["ip", "link"])
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"booted\n"
    family = psutil.Process(owner.pid).children(recursive=True)
    assert sum(process.name() == "sleep" for process in family) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert subprocess.check_output(["ip", "link"]) == links


# ------------------------------------------------------------------------ hosts die


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [ONCE, LONG])
def test_host_that_dies_during_a_step_does_not_change_the_results(rounds, cluster, twin, shared) -> None:
    """The run continues on the spare host; the dead host returns under its old name."""
    rng = random.Random(SEED)
    times_s: list[float] = []
    for number in range(rounds):
        run = shared / f"step-{rounds}-{number}"
        driver = begin(cluster, run)
        driver.until(has_reported(run, rng.randrange(8, 30)), AGAIN_S)
        victim = a_worker_host(driver, rng)
        time.sleep(rng.random() * 0.05)
        killed = cluster.network[victim].kill()
        noticed_s, again_s = go_on(driver, attempt=2)
        if number + 1 < rounds:
            cluster.join(victim)
        assert driver.wait(AGAIN_S) == 0, driver.output
        print(f"FAULT_SEED={SEED} round {number}: {victim} with {killed} processes killed in mid-step; ", end="")
        print(f"noticed after {noticed_s:.1f} s, trained again {again_s:.1f} s later; {verdict(driver)}")
        assert victim not in newest_nodes(driver.run).values()
        assert f"on {victim}, " in verdict(driver), "the host that died is named"
        assert_same(run, twin)
        assert noticed_s <= NOTICED_S
        times_s.append(again_s)
    # Assert after all rounds, so that a slow round on a busy machine does not hide the later rounds.
    assert max(times_s) <= 30, times_s


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [ONCE, LONG])
def test_host_that_dies_during_a_save_does_not_change_the_results(rounds, cluster, twin, shared) -> None:
    rng = random.Random(SEED + 1)
    times_s: list[float] = []
    for number in range(rounds):
        run = shared / f"save-{rounds}-{number}"
        driver = begin(cluster, run)
        step = rng.choice([10, 15, 20, 25])
        driver.until(has_reported(run, step - 3), AGAIN_S)
        victim = a_worker_host(driver, rng)
        driver.until(is_saving(run, step), AGAIN_S)
        time.sleep(rng.random() * 0.02)
        cluster.network[victim].kill()
        amid = is_saving(run, step)()
        noticed_s, again_s = go_on(driver, attempt=2)
        if number + 1 < rounds:
            cluster.join(victim)
        assert driver.wait(AGAIN_S) == 0, driver.output
        where = "amid its files" if amid else "just committed"
        print(f"FAULT_SEED={SEED} round {number}: {victim} killed in the save of step {step}, {where}; ", end="")
        print(f"noticed after {noticed_s:.1f} s, trained again {again_s:.1f} s later; {verdict(driver)}")
        assert_same(run, twin)
        assert noticed_s <= NOTICED_S
        times_s.append(again_s)
    # Assert after all rounds, so that a slow round on a busy machine does not hide the later rounds.
    assert max(times_s) <= 30, times_s


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_waits_after_two_hosts_died_at_once_and_continues_when_they_return(cluster, twin, shared) -> None:
    run = shared / "two-deaths"
    driver = begin(cluster, run)
    driver.until(has_reported(run, 12), AGAIN_S)
    for name in cluster.names[1:]:
        cluster.network[name].kill()
    noticed_s = driver.until(has_printed(driver, "restarting from"), AGAIN_S)
    driver.until(has_printed(driver, "waiting for the cluster: room for 1 of 2 workers"), AGAIN_S)
    cluster.join(*cluster.names[1:])
    again_s = driver.until(has_printed(driver, "attempt 2: "), AGAIN_S)
    assert driver.wait(AGAIN_S) == 0, driver.output
    print(f"two hosts killed at once: noticed after {noticed_s:.1f} s, ", end="")
    print(f"trained again {again_s:.1f} s after they had joined")
    assert_same(run, twin)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_host_that_comes_back_under_its_old_name_at_once_is_another_one(cluster, twin, shared) -> None:
    """The host returns before Ray notices its loss."""
    run = shared / "old-name"
    driver = begin(cluster, run)
    driver.until(has_reported(run, 12), AGAIN_S)
    victim = a_worker_host(driver, random.Random(SEED + 4))
    cluster.network[victim].kill()
    cluster.join(victim)
    go_on(driver, attempt=2)
    assert driver.wait(AGAIN_S) == 0, driver.output
    assert f"on {victim}, " in verdict(driver), verdict(driver)
    assert "its node " in verdict(driver), verdict(driver)
    assert_same(run, twin)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [ONCE, LONG])
def test_drained_host_loses_no_step_and_causes_no_incident(rounds, cluster, shared) -> None:
    """Runs have five times as many steps, because `ray drain-node` takes seconds."""
    rng = random.Random(SEED + 5)
    steps = "pretrain.steps=200"
    twin = shared / f"drain-{rounds}-twin"
    process = start(twin, *OVERRIDES, steps)
    process.join()
    assert process.exitcode == 0, output_of(twin)
    for number in range(rounds):
        run = shared / f"drain-{rounds}-{number}"
        driver = begin(cluster, run, steps)
        driver.until(has_reported(run, rng.randrange(5, 25)), AGAIN_S)
        victim = a_worker_host(driver, rng)
        cluster.drain(victim, run, stays_s=60)
        again_s = driver.until(has_printed(driver, "attempt 2: "), AGAIN_S)
        # A reclaimed host returns as a restarted one.
        cluster.network[victim].kill()
        if number + 1 < rounds:
            cluster.join(victim)
        assert driver.wait(AGAIN_S) == 0, driver.output
        print(f"FAULT_SEED={SEED} round {number}: {victim} gave notice; trained again {again_s:.1f} s later")
        assert f"leaving the cluster: {victim} (its node is being drained)" in driver.output
        assert not (stage(run) / "incidents.txt").exists()
        assert "is slow" not in driver.output
        taken = [step for record in read_metrics(stage(run)) for step in steps_of(record)]
        assert taken == list(range(1, 201)), "every step once"
        assert_same_stage(stage(run), stage(twin))


def steps_of(record: Record) -> range:
    """Return the steps in a report."""
    return range(record["step"] - len(record["losses"]) + 1, record["step"] + 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_continues_with_fewer_or_more_workers_as_hosts_are_lost_and_join(cluster, shared) -> None:
    """Two workers, one, two: the same bits as an undisturbed single worker, because the parts are fixed."""
    exact = ["pretrain.exact_parts=4", "pretrain.steps=1000", "pretrain.save_every=20"]
    alone = shared / "alone"
    process = start(alone, "cluster.workers=1", *OVERRIDES, *exact)
    run = shared / "fewer"
    patience = ["cluster.workers.least=1", "cluster.workers.most=2", "cluster.patience_s=5"]
    driver = begin(cluster, run, *exact, *patience)
    driver.until(has_reported(run, 25), AGAIN_S)
    for name in cluster.names[1:]:
        cluster.network[name].kill()
    noticed_s, again_s = go_on(driver, attempt=2)
    assert "continuing with 1 of up to 2 workers: room for 1 of 2 workers" in driver.output

    before_join = time.monotonic()
    cluster.join(cluster.names[1])
    join_s = time.monotonic() - before_join
    grown_s = driver.until(has_printed(driver, "scaling up from 1 to 2 workers, resuming from step "), AGAIN_S)
    more_s = driver.until(has_printed(driver, "attempt 3: "), AGAIN_S)
    assert driver.wait(2 * AGAIN_S) == 0, driver.output
    print(f"two hosts lost: noticed after {noticed_s:.1f} s, one worker trained {again_s:.1f} s later; ", end="")
    print(f"a host joined in {join_s:.1f} s; stopped {grown_s:.1f} s later, two trained {more_s:.1f} s after that")
    assert [record["world"] for record in read_metrics(stage(run), "start")] == [2, 1, 2]
    assert (stage(run) / "incidents.txt").read_text().count("its node ") == 1
    (grown,) = re.findall(r"scaling up from 1 to 2 workers, resuming from step (\d+)", driver.output)
    steps = {attempt: [] for attempt in (1, 2, 3)}
    for record in read_metrics(stage(run)):
        steps[record["attempt"]].append(record["step"])
    assert steps[2][-1] == int(grown) == steps[3][0] - 1, "no step is lost, and none done twice"

    process.join(2 * AGAIN_S)
    assert process.exitcode == 0, output_of(alone)
    ours, theirs = (read_manifest(committed(stage(path) / "checkpoints")[0]) for path in (run, alone))
    assert ours.ledger == theirs.ledger
    assert ours.step == theirs.step == 1000
    digests = [hashlib.sha256((stage(path) / "weights.safetensors").read_bytes()).digest() for path in (run, alone)]
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [ONCE, QUARTER])
def test_same_command_resumes_on_a_new_cluster_after_the_head_is_lost(rounds, cluster, twin, shared) -> None:
    rng = random.Random(SEED + 6)
    for number in range(rounds):
        run = shared / f"head-{rounds}-{number}"
        driver = begin(cluster, run)
        driver.until(has_reported(run, rng.randrange(8, 30)), AGAIN_S)
        for name in cluster.names:
            cluster.network[name].kill()
        driver.process.wait(30)
        began = time.monotonic()
        cluster.start()
        started_s = time.monotonic() - began
        driver = begin(cluster, run)
        again_s = driver.until(has_printed(driver, "resumed from step"), AGAIN_S)
        assert driver.wait(AGAIN_S) == 0, driver.output
        print(f"FAULT_SEED={SEED} round {number}: head lost; a new cluster took {started_s:.1f} s, ", end="")
        print(f"the same command trained {again_s:.1f} s later")
        assert_same(run, twin)


HEAD = "ray start --head --port=6379 --dashboard-host=0.0.0.0"
LOG_IN = "export RAY_AUTH_MODE=token; mkdir -p ~/.ray; cp {token} ~/.ray/auth_token; chmod 600 ~/.ray/auth_token; "


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [Host.cut, Host.black_hole])
def test_node_removed_by_the_head_rejoins_once_its_link_works(fault, shared) -> None:
    token = shared / "token-of-nodes"
    token.write_text(os.urandom(32).hex())
    login = LOG_IN.format(token=token)
    with Network(shared) as network:
        network.boot("h0").run(login + HEAD, timeout_s=START_TIMEOUT_S, **PATIENCE)
        log = shared / f"node-{fault.__name__}.log"
        with log.open("w") as output:
            node = network.boot("h1").start(f"{login} exec python deploy/node.py h0:6379", output, **PATIENCE)
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)

        fault(network["h1"])
        time.sleep(40)
        assert node.poll() is None, "silence alone ends nothing"
        network["h1"].mend()
        node.wait(15)  # Ray itself ended 26 s after the link was repaired
        assert "has removed this node: joining again" in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_following_a_submitted_run_reports_a_lost_head_and_continues_when_it_returns(shared) -> None:
    """First the head is cut off, which closes no connection; then it loses power, and returns with an empty disk."""
    token = shared / "token"
    token.write_text(os.urandom(32).hex())
    login = LOG_IN.format(token=token)
    recipe = shared / "followed.yaml"
    recipe.write_text(SMALL)
    run = shared / "followed"
    address = {"RAY_ADDRESS": "http://h0:8265", "OMP_NUM_THREADS": "1"}
    words = f"{recipe} run={run} cluster.backend=ray cluster.workers=1 pretrain.steps=100000 pretrain.log_every=1"

    with Network(shared) as network:

        def start_head() -> None:
            network.boot("h0").run(login + HEAD, timeout_s=START_TIMEOUT_S, **PATIENCE)

        def follow(log: Path) -> subprocess.Popen[bytes]:
            with log.open("w") as output:
                return network["h1"].start(f"{login} exec python -m jobs submit --wait {words}", output, **address)

        def wait_for(log: Path, text: str) -> None:
            deadline = time.monotonic() + AGAIN_S
            while text not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)

        start_head()
        network.boot("h1")
        before, after = shared / "follow-1.log", shared / "follow-2.log"
        follower = follow(before)
        wait_for(before, "checkpoint step 5 committed")
        assert "(process " in (told := network["h1"].run(f"{login} python -m jobs status {run}")), told
        assert ", Ray job followed-001-" in told
        assert "now  running, started" in told
        network["h0"].black_hole()
        began = time.monotonic()
        assert follower.wait(AGAIN_S) == 69, before.read_text()
        print(f"head cut off: followed no more after {time.monotonic() - began:.0f} s")
        assert "the cluster's head at http://h0:8265 has not responded for " in before.read_text()

        network["h0"].kill()
        told = network["h1"].run(f"{login} python -m jobs status {run}")
        assert "end  ended unexpectedly: process " in told
        assert " on h0, Ray job followed-001-" in told
        assert f"to resume, run python -m jobs submit RECIPE run={run}" in told
        start_head()
        began = time.monotonic()
        follower = follow(after)
        wait_for(after, "resumed from step ")
        print(f"a new head: trained again {time.monotonic() - began:.0f} s after the submission")
        assert "taking over the run: process " in after.read_text()
        network["h1"].run(f"{login} python -m jobs stop {run}", timeout_s=AGAIN_S, **address)
        assert follower.wait(AGAIN_S) == 75, after.read_text()


FILL = """
set -e
used=$(df --output=used -k /tmp | tail -1)
mount -o remount,size=$((used + 64))k /tmp
cat /dev/zero >/tmp/ballast 2>/dev/null || true
! echo more >/tmp/more 2>/dev/null
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_on_one_host_does_not_stop_the_run(cluster, twin, shared) -> None:
    """The host's local disk, for Ray and its programs, is full; the shared disk has space."""
    run = shared / "full"
    driver = begin(cluster, run)
    driver.until(has_reported(run, 7), AGAIN_S)
    victim = a_worker_host(driver, random.Random(SEED + 4))
    cluster.network[victim].run(FILL)
    code = driver.wait(2 * AGAIN_S)
    # Its Ray may have given up, so give the next test a fresh host.
    cluster.network[victim].kill()
    restarts = driver.output.count("restarting from")
    print(f"FAULT_SEED={SEED + 4}: disk of {victim} full after step 7; {restarts} restarts; {verdict_or_none(driver)}")
    assert code == 0, driver.output
    assert_same(run, twin)


# ------------------------------------------------------------------------ links fail


def cut(cluster: RayHosts, host: str) -> None:
    cluster.network[host].cut()


def black_hole(cluster: RayHosts, host: str) -> None:
    cluster.network[host].black_hole()


@pytest.mark.parametrize("rounds", [ONCE, HALF])
@pytest.mark.parametrize("fault", [cut, black_hole])
@pytest.mark.slow
def test_host_with_a_dead_link_is_detected_and_cannot_commit(fault, rounds, cluster, twin, shared) -> None:
    rng = random.Random(SEED + 2)
    times_s: list[float] = []
    for number in range(rounds):
        run = shared / f"{fault.__name__}-{rounds}-{number}"
        driver = begin(cluster, run)
        driver.until(has_reported(run, rng.randrange(8, 30)), AGAIN_S)
        victim = a_worker_host(driver, rng)
        fault(cluster, victim)
        time.sleep(1.0)  # let a commit in progress finish
        before = {folder.name for folder in committed(stage(run) / "checkpoints")}
        noticed_s, again_s = go_on(driver, attempt=2)
        cluster.network[victim].mend()
        code = driver.wait(AGAIN_S)
        # Its Ray has given up by now, so the host returns as a restarted one.
        cluster.network[victim].kill()
        if number + 1 < rounds:
            cluster.join(victim)
        print(f"FAULT_SEED={SEED} round {number}: {fault.__name__} of {victim}: noticed after ", end="")
        print(f"{noticed_s + 1.0:.1f} s, trained again {again_s:.1f} s later; {verdict(driver)}")
        assert code == 0, driver.output
        for folder in committed(stage(run) / "checkpoints"):
            assert folder.name in before or read_manifest(folder).attempt == 2
        assert_same(run, twin)
        times_s.append(noticed_s + 1.0)
    assert max(times_s) <= NOTICED_S, times_s


@pytest.mark.parametrize("fault", [cut, black_hole])
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dead_link_of_5_s_restarts_nothing(fault, cluster, twin, shared) -> None:
    run = shared / f"blip-{fault.__name__}"
    driver = begin(cluster, run)
    driver.until(has_reported(run, 12), AGAIN_S)
    victim = a_worker_host(driver, random.Random(SEED + 7))
    fault(cluster, victim)
    began = time.monotonic()
    time.sleep(5.0)
    cluster.network[victim].mend()
    steps = read_metrics(stage(run))[-1]["step"]
    dead_s = time.monotonic() - began
    again_s = driver.until(has_reported(run, steps + 1), AGAIN_S)
    assert driver.wait(AGAIN_S) == 0, driver.output
    print(f"{fault.__name__} of {victim} for {dead_s:.1f} s at step {steps}; the next step {again_s:.1f} s later")
    assert steps < 40, "the run had ended before the link was whole"
    assert "restarting" not in driver.output
    assert not (stage(run) / "incidents.txt").exists()
    assert_same(run, twin)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [ONCE, QUARTER])
def test_minute_of_network_delay_and_loss_causes_no_restart(rounds, cluster, twin, shared) -> None:
    rng = random.Random(SEED + 3)
    for number in range(rounds):
        run = shared / f"slow-{rounds}-{number}"
        driver = begin(cluster, run)
        driver.until(has_reported(run, 5), AGAIN_S)
        victim = a_worker_host(driver, rng)
        cluster.network[victim].slow(delay_s=0.2, loss=0.05, seed=SEED + number)
        time.sleep(60)
        slow_steps = sum(len(record["losses"]) for record in read_metrics(stage(run)))
        cluster.network[victim].mend()
        assert driver.wait(AGAIN_S) == 0, driver.output
        print(f"FAULT_SEED={SEED} round {number}: 200 ms and 5 % loss for 60 s to {victim}: ", end="")
        print(f"step {slow_steps} after it; no restart")
        assert "restarting" not in driver.output
        assert slow_steps < 40, "the run had ended before the minute was over"
        assert_same(run, twin)


# ------------------------------------------------------------------------ preflight


def preflight(cluster: RayHosts, run: Path, *overrides: str) -> tuple[int, str]:
    """Run `python -m jobs preflight` on the head; return the exit code and what it printed."""
    recipe = cluster.network.shared / "preflight.yaml"
    recipe.write_text(SMALL)
    words = ["python", "-m", "jobs", "preflight", str(recipe), f"run={run}", "cluster.backend=ray", *overrides]
    log = cluster.network.shared / "preflight.log"
    with log.open("w") as output:
        process = cluster.head.start(words, output, RAY_ADDRESS=cluster.address, OMP_NUM_THREADS="1")
        code = process.wait(AGAIN_S)
    print(log.read_text())
    return code, log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_preflight_names_the_slow_link_and_passes_once_it_is_repaired(cluster, shared) -> None:
    cluster.network["h2"].slow(delay_s=0.1, loss=0.0, seed=SEED)
    try:
        code, said_then = preflight(cluster, shared / "preflight", "cluster.workers=3", "pretrain.batch_size=24")
    finally:
        cluster.network["h2"].mend()
    assert code == 0, said_then
    warning = re.search(
        r"^WARN links +all 3 pairs of workers; slowest \d–\d \((\w+), (\w+)\).*\n +→ (.*)", said_then, re.M
    )
    assert warning is not None, said_then
    assert "h2" in warning.groups()[:2], said_then
    assert warning[3].startswith("look at h2's cable")
    code, said_now = preflight(cluster, shared / "preflight", "cluster.workers=3", "pretrain.batch_size=24")
    assert code == 0
    assert re.search("^OK   links", said_now, re.M)
    assert "on 3 nodes" in said_now
    assert re.search(r"^OK   clocks      within [\d.]+ m?s of the driver's", said_now, re.M)
    assert "spare node" not in said_now
    # Two workers leave a spare host, to which an attempt may move after a fault.
    code, said_of_two = preflight(cluster, shared / "preflight", "cluster.workers=2")
    assert code == 0
    assert re.search(r"^OK   workers     2 on .*; \d spare nodes? checked too", said_of_two, re.M)
    assert re.search(r"^OK   run folder  the same on the driver and 3 nodes", said_of_two, re.M)
    assert not (shared / "preflight").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_directory_of_each_host_alone_is_refused_by_preflight_and_by_run(cluster, shared) -> None:
    run = Path("/tmp/alone/run")  # every host has a separate /tmp
    for name in cluster.names:
        cluster.network[name].run("mkdir -p /tmp/alone")
    code, said_here = preflight(cluster, run)
    assert code == 69
    assert re.search("^FAIL workers .*the driver's folder .* did not appear on h", said_here, re.M)
    recipe = shared / "alone.yaml"
    recipe.write_text(SMALL)
    driver = Driver(cluster, [str(recipe), f"run={run}", "cluster.backend=ray", *OVERRIDES], shared / "alone")
    assert driver.wait(AGAIN_S) == 69, driver.output
    print(driver.output)
    assert "expected: a run directory on storage that every node mounts at the same path" in driver.output
    assert "checkpoint step" not in driver.output


# ------------------------------------------------------------------------ a node unlike the others


def restart_with_other_torch(cluster: RayHosts, name: str) -> None:
    """Reboot a host with a different reported version of torch."""
    packages = cluster.network.shared / "other-packages" / "torch-2.12.0.dist-info"
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    cluster.network[name].kill()
    cluster.join(name, PYTHONPATH=str(packages.parent))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_node_with_another_torch_is_excluded_and_too_few_nodes_are_refused(cluster, twin, shared) -> None:
    restart_with_other_torch(cluster, "h1")
    try:
        # Whether it runs a worker or is spare, this host is named, not rank 0 or the hosts that differ from it.
        code, of_two = preflight(cluster, shared / "preflight", "cluster.workers=2")
        assert code == 69
        assert re.search(r"^FAIL versions    (worker \d on|node) h1 has torch 2.12.0, 2 of 3 nodes have ", of_two, re.M)
        # With a worker on every host the start fails; with two workers it depends on Ray's placement.
        run = shared / "unlike"
        driver = begin(cluster, run, "cluster.workers.least=2", "cluster.workers.most=3", "pretrain.batch_size=12")
        assert driver.wait(2 * AGAIN_S) == 0, driver.output
        print(driver.output)
        (line,) = (line for line in driver.output.splitlines() if "left out" in line)
        assert "excluded from this campaign: h1 (node h1 has torch 2.12.0, 2 of 3 nodes have " in line
        assert sorted(newest_nodes(run).values()) == ["h0", "h2"]
        driver = begin(cluster, shared / "too-few", "cluster.workers=3", "pretrain.batch_size=12")
        assert driver.wait(2 * AGAIN_S) == 69, driver.output
        assert "without h1 the cluster has room for 2 of 3 workers" in driver.output
    finally:
        cluster.network["h1"].kill()


# ------------------------------------------------------------------------ a stranger on the network

STRANGER = """
import http.client, sys
import grpc
head = sys.argv[1]
with grpc.insecure_channel(f"{head}:6379") as channel:
    try:
        print("gcs", channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=20))
    except grpc.RpcError as error:
        print("gcs", error.code().name)
for port, path in ((8265, "/api/jobs/"), (52365, "/logs"), (52365, "/api/job_agent/jobs/")):
    try:
        connection = http.client.HTTPConnection(head, port, timeout=10)
        connection.request("GET", path)
        print(port, path, connection.getresponse().status)
    except OSError as error:
        print(port, path, type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_host_without_the_token_learns_nothing(cluster) -> None:
    """The README's commands started the cluster; metrics ports require no token (docs/design/cluster.md)."""
    told = cluster.network["h1"].run([sys.executable, "-c", STRANGER, cluster.head.address])
    print(told)
    assert told.splitlines() == [
        "gcs UNAUTHENTICATED",
        "8265 /api/jobs/ ConnectionRefusedError",
        "52365 /logs 401",
        "52365 /api/job_agent/jobs/ 401",
    ]
