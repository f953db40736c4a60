"""Run deploy/slurm/train.sbatch under a real Slurm on two simulated hosts: slurmctld, slurmd and munged.

The tests need root and Debian's packages slurmctld, slurmd, slurm-client and munge, and are skipped without them.
tests/support/hosts.py simulates the hosts.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.drives import assert_same_stage, output_of, start
from tests.support.hosts import ROOT, Network
from tests.support.ray_hosts import PATIENCE
from tests.test_jobs.run.test_sync import BUCKET, CREDENTIALS, recipe_on

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
LACK = ", ".join(program for program in PROGRAMS if shutil.which(program) is None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing()),
    pytest.mark.skipif(LACK != "", reason=f"Slurm is not installed: {LACK}"),
]

NAMES = ("n0", "n1")
SLURM_CONF = """
ClusterName=test
SlurmctldHost=n0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.socket
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={shared}/slurmctld.log
SlurmdLogFile={shared}/slurmd-%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n[0-1] CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The hosts have no control groups; Slurm 22.05 can disable them, or use an imitation of their folder.
CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/tmp/cgroup
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the storage shared by both hosts, with their user's home."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "home").mkdir()
    (folder / "slurm.conf").write_text(SLURM_CONF.format(shared=folder))
    (folder / "cgroup.conf").write_text(CGROUP_CONF)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def network(shared: Path) -> Iterator[Network]:
    """Run a Slurm cluster of two hosts."""
    munged = (
        f"munged --force --key-file={shared}/munge.key --socket=/tmp/munge.socket --pid-file=/tmp/munged.pid "
        "--seed-file=/tmp/munged.seed --log-file=/tmp/munged.log"
    )
    conf = f"{shared}/slurm.conf"
    with Network(shared) as network:
        for name in NAMES:
            network.boot(name).run(f"{munged} && mkdir -p /tmp/slurmctld /tmp/slurmd /tmp/cgroup/systemd")
        network["n0"].run(f"slurmctld -f {conf}")
        for name in NAMES:
            network[name].run(f"slurmd -f {conf}")
        wait_for(network, "sinfo -h -N -o %T", "idle\nidle", 60)
        yield network


def slurm(network: Network, command: str) -> str:
    """Run a Slurm command on the first host, as a user with a shared home."""
    shared = network.shared
    environment = {"HOME": str(shared / "home"), "SLURM_CONF": str(shared / "slurm.conf"), **PATIENCE}
    return network["n0"].run(command, **environment)


def wait_for(network: Network, command: str, text: str, timeout_s: float) -> None:
    """Wait until the command prints the text."""
    deadline = time.monotonic() + timeout_s
    printed = ""
    while text not in printed:
        assert time.monotonic() < deadline, f"{command}: {printed}"
        time.sleep(1)
        printed = slurm(network, command).strip()


def log_of(shared: Path, job: str) -> str:
    path = shared / f"patchline-{job}.log"
    return path.read_text() if path.exists() else ""


def submit(network: Network, options: str, words: str) -> str:
    """Submit the script as its header describes, with other limits; return the job's number."""
    shared = network.shared
    slurm(network, "test -e ~/.ray/auth_token || RAY_AUTH_MODE=token ray get-auth-token --generate")
    script = ROOT / "deploy" / "slurm" / "train.sbatch"
    said = slurm(network, f"cd {ROOT} && sbatch {options} --output={shared}/patchline-%j.log {script} {words}")
    (number,) = re.findall(r"Submitted batch job (\d+)", said)
    return number


def wait_for_log(shared: Path, job: str, text: str, timeout_s: float) -> None:
    """Wait until the job's log has the text; until then only stops may end the campaign."""
    deadline = time.monotonic() + timeout_s
    while text not in (log := log_of(shared, job)):
        assert time.monotonic() < deadline, log
        assert "exit code" not in log.replace("exit code 75", ""), log
        time.sleep(1)


@pytest.mark.timeout(3000)
def test_job_commits_before_its_time_limit_and_resumes_until_it_is_done(network) -> None:
    """The reference is an undisturbed run in plain processes, without Slurm, Ray and hosts."""
    recipe = ROOT / "jobs" / "recipes" / "digits.yaml"
    run, twin = network.shared / "limit", network.shared / "twin"
    overrides = ["cluster.workers=2", "pretrain.passes=60", "pretrain.log_every=1", "finetune.log_every=1"]
    undisturbed = start(twin, *overrides, "cluster.backend=processes", recipe=recipe.read_text())
    job = submit(network, "--time=5 --signal=B:USR1@150", f"{recipe} run={run} {' '.join(overrides)}")
    wait_for_log(network.shared, job, "the campaign ended with exit code 75, start 1 of job", 600)
    deadline = time.monotonic() + 2000
    while "the campaign ended with exit code 0, start " not in (log := log_of(network.shared, job)):
        assert time.monotonic() < deadline, log
        time.sleep(2)
    assert "the time limit is near; asking the campaign to commit" in log
    assert re.search(r"attempt \d: resumed from step \d+ ", log)
    wait_for(network, f"scontrol show job {job}", "JobState=COMPLETED", 120)
    undisturbed.join()
    assert undisturbed.exitcode == 0, output_of(twin)
    for name in ("pretrain", "finetune"):
        (folder,) = run.glob(f"{name}-*")
        (expected,) = twin.glob(f"{name}-*")
        assert_same_stage(folder, expected)


@pytest.mark.timeout(1500)
def test_run_in_a_bucket_commits_before_the_limit_resumes_and_is_not_requeued_on_request(network) -> None:
    """The hosts share no folder of the run; the store is on a third host."""
    shared = network.shared
    with (shared / "store.log").open("w") as log:
        network.boot("store").start("python -m moto.server -H 0.0.0.0 -p 5000", log)
    recipe = shared / "bucket.yaml"
    recipe.write_text(recipe_on(shared / "sets"))
    slurm(network, f"python -m jobs pack digits - {shared}/sets/train --shard-samples 100")
    slurm(network, CREDENTIALS)
    wait_for(network, f"cat {shared}/store.log", "Running on", 60)
    slurm(network, f'python -c "{BUCKET}"')

    words = f"{recipe} run=s3://images/runs/limit cluster.scratch=/tmp/scratch cluster.backend=ray"
    words += " pretrain.steps=1000000 pretrain.log_every=50 pretrain.save_every=50"
    job = submit(network, "--time=4 --signal=B:USR1@120", words)
    wait_for_log(shared, job, "checkpoint step 50 committed", 300)
    told = slurm(network, "python -m jobs status s3://images/runs/limit")
    assert f", Slurm job {job}): " in told, told
    assert "now  running, started" in told, told
    wait_for_log(shared, job, f"the campaign ended with exit code 75, start 1 of job {job}", 300)
    assert "slurm: the time limit is near; asking the campaign to commit" in log_of(shared, job)
    wait_for_log(shared, job, "attempt 2: resumed from step ", 500)

    with pytest.raises(RuntimeError, match=f"exit code 64[^$]*type on n0: scancel --batch --signal=TERM {job}"):
        slurm(network, "python -m jobs stop s3://images/runs/limit")
    slurm(network, f"scancel --batch --signal=TERM {job}")
    wait_for(network, f"scontrol show job {job}", "JobState=FAILED", 240)
    state = slurm(network, f"scontrol show job {job}")
    assert "ExitCode=75:0" in state, state
    assert "Restarts=1" in state, state
    assert "slurm: stop requested; asking the campaign to commit" in log_of(shared, job)
