"""The files of deploy/ contain what docs/ways-in.md promises; test_slurm.py tests that they run."""

import configparser
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.errors import ExitCode
from jobs.extras.submit.submission import STOP_GRACE_S

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kuberay" / name).read_text())


def clusters() -> list[dict[str, Any]]:
    """Return the specs of both Ray clusters."""
    return [manifest("raycluster.yaml")["spec"], manifest("rayjob.yaml")["spec"]["rayClusterSpec"]]


def pods() -> list[dict[str, Any]]:
    """Return the specs of all pods that run Ray."""
    specs = []
    for cluster in clusters():
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            specs.append(group["template"]["spec"])
    return specs


def test_a_pod_has_the_time_for_its_hook_and_a_stopped_job_for_its_commit() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        python, script, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (python, ROOT / Path(script).relative_to("/opt/patchline")) == ("python", DEPLOY / "leave_node.py")
        assert (DEPLOY / "leave_node.py").exists()
        assert float(seconds) + 60 <= pod["terminationGracePeriodSeconds"]
    variables = yaml.safe_load(manifest("rayjob.yaml")["spec"]["runtimeEnvYAML"])["env_vars"]
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == str(STOP_GRACE_S)


def test_pods_run_without_root_or_privileges_and_share_the_run_directory() -> None:
    job_pod = manifest("submit.yaml")["spec"]["template"]["spec"]
    for pod in [*pods(), job_pod]:
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        rights = container["securityContext"]
        assert rights == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["shared"] == "/shared"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "patchline-shared"}


def test_manifests_read_the_cluster_token_from_a_secret() -> None:
    for cluster in clusters():
        assert cluster["authOptions"] == {"mode": "token", "secretName": "patchline-token"}
        assert cluster["rayVersion"] == PINNED["ray"]
    (container,) = manifest("submit.yaml")["spec"]["template"]["spec"]["containers"]
    token = {entry["name"]: entry for entry in container["env"]}["RAY_AUTH_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "patchline-token", "key": "auth_token"}}


def test_a_campaign_under_kueue_names_the_queue_and_the_class_that_the_manifest_makes_and_starts_suspended() -> None:
    kustomization = manifest("kustomization.yaml")
    assert kustomization["resources"] == ["kueue.yaml", "networkpolicy.yaml", "rayjob.yaml"]
    (entry,) = kustomization["patches"]
    patch = yaml.safe_load(entry["patch"])
    job = manifest("rayjob.yaml")
    for target in (entry["target"], {"kind": patch["kind"], "name": patch["metadata"]["name"]}):
        assert target == {"kind": job["kind"], "name": job["metadata"]["name"]}
    made = {}
    for document in yaml.safe_load_all((DEPLOY / "kuberay" / "kueue.yaml").read_text()):
        made[document["kind"]] = document["metadata"]["name"]
    labels = patch["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == made["LocalQueue"]
    assert labels["kueue.x-k8s.io/priority-class"] == made["WorkloadPriorityClass"]
    # Kueue requires both: it removes `suspend`, and a cluster that outlives its job would keep its quota.
    assert patch["spec"] == {"suspend": True}
    assert job["spec"]["shutdownAfterJobFinishes"] is True


MISTAKES = {ExitCode.USAGE, ExitCode.DATA, ExitCode.CONFIG}  # which a restart does not fix


def test_submitted_campaign_is_retried_after_a_commit_and_a_lost_head_but_not_after_a_mistake() -> None:
    job = manifest("submit.yaml")["spec"]
    actions: dict[str, set[int]] = {}
    for rule in job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert (rule["onExitCodes"]["containerName"], rule["onExitCodes"]["operator"]) == ("submit", "In")
            actions[rule["action"]] = set(rule["onExitCodes"]["values"])
    assert actions == {"Ignore": {ExitCode.UNAVAILABLE, ExitCode.PREEMPTED}, "FailJob": MISTAKES}
    assert 0 < job["backoffLimit"] < 100, "others, such as a run that diverges, are tried a few times"
    (container,) = job["template"]["spec"]["containers"]
    shell, option, script = container["command"]
    assert (shell, option) == ("sh", "-c")
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0
    words = shlex.split(script)
    assert words[:6] == ["exec", "python", "-m", "jobs", "submit", "--wait"]
    assert "run=$RUN" in words


def test_slurm_script_signals_its_driver_and_requeues_by_exit_code(tmp_path) -> None:
    """Runs the script with fake commands that print their arguments; the driver exits with a code or waits for TERM."""
    script = DEPLOY / "slurm" / "train.sbatch"
    told = tmp_path / "told"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    driver = f'#!/bin/sh\ntrap "echo term >>{told}; exit 75" TERM\nsleep 0.3\necho "driver $*" >>{told}\n'
    driver += '[ "$CODE" = wait ] || exit "$CODE"\nwhile :; do sleep 0.05; done\n'
    commands = {"python": driver, "ray": "#!/bin/sh\n", "srun": f'#!/bin/sh\necho "srun $*" >>{told}\nexec sleep 30\n'}
    commands["scontrol"] = f'#!/bin/sh\n[ $1 = show ] && echo n0 && exit\necho "scontrol $*" >>{told}\n'
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "patchline-17.log"
    # Ends of earlier starts, the driver's action, Slurm's signal to the script, the script's exit code, and
    # whether it is put back.
    table: tuple[tuple[list[int], str, int | None, int, bool], ...] = (
        ([], "0", None, 0, False),
        ([], "75", None, 75, True),
        ([75] * 30, "69", None, 69, True),
        ([69] * 19 + [75] + [69] * 19, "69", None, 69, True),
        ([75] + [69] * 20, "69", None, 69, False),
        ([], "65", None, 65, False),
        ([], "wait", signal.SIGUSR1, 75, True),
        ([], "wait", signal.SIGTERM, 75, False),
    )
    for before, code, sent, expected, is_put_back in table:
        told.write_text("")
        end = "slurm: the campaign ended with exit code {}, start {} of job 17\n"
        log.write_text("".join(end.format(code, start) for start, code in enumerate(before, 1)))
        variables = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17", "CODE": code}
        variables["SLURM_RESTART_COUNT"] = str(len(before))
        variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        with log.open("a") as output:
            job = subprocess.Popen(
                ["bash", script, "digits", "run=s3://bucket/x"], cwd=tmp_path, env=variables, stdout=output
            )
        if sent is not None:
            deadline = time.monotonic() + 120
            while "driver " not in told.read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            job.send_signal(sent)
        assert job.wait(60) == expected, code
        assert log.read_text().endswith(end.format(expected, len(before) + 1))
        lines = told.read_text()
        assert "driver -m jobs run digits run=s3://bucket/x" in lines
        assert ("term" in lines) == (sent is not None)
        assert ("scontrol requeue 17" in lines) == is_put_back, (before, code, sent)
        assert lines.count("srun ") == 2
        assert "--nodelist=n0 ray start --head" in lines
        assert "--exclude=n0" in lines


def units() -> dict[str, configparser.ConfigParser]:
    """Return the settings of the systemd units by name; the last value if a key is repeated."""
    parsed = {}
    for path in (DEPLOY / "systemd").glob("*.service"):
        parsed[path.name] = configparser.ConfigParser(strict=False, interpolation=None)
        parsed[path.name].optionxform = str  # type: ignore[assignment,method-assign]
        parsed[path.name].read_string(path.read_text())
    return parsed


def test_units_restart_resumable_exits_and_pass_the_token_on() -> None:
    found = units()
    assert found.keys() == {"patchline-head.service", "patchline-node.service", "patchline-driver@.service"}
    for name, unit in found.items():
        service = unit["Service"]
        assert service["User"] == "patchline"
        assert service["NoNewPrivileges"] == "yes"
        assert service["LoadCredential"].startswith("auth_token:")
        assert unit["Unit"]["StartLimitIntervalSec"] == "0"
        is_driver = "driver" in name
        assert service["Restart"] == ("on-failure" if is_driver else "always")
        # A stop leaves enough time for a commit before anything is killed.
        if "head" not in name:
            assert float(service["TimeoutStopSec"]) >= STOP_GRACE_S
    driver = found["patchline-driver@.service"]["Service"]
    not_again = {int(code) for code in driver["RestartPreventExitStatus"].split()}
    assert not_again == MISTAKES | {ExitCode.INTERNAL, ExitCode.OWNED}, "what systemd repeats it repeats for ever"
    assert "SuccessExitStatus" not in driver, "75 would be taken for the end"
    # If Ray exits by itself, systemd runs ExecStop too, and waiting for the missing Ray would take a minute.
    stop = found["patchline-node.service"]["Service"]["ExecStop"].removeprefix("-").replace("$$", "$")
    stop = stop.replace("/opt/patchline/.venv/bin/python", "echo")
    for environment, expected in (({}, ""), ({"MAINPID": "7"}, "/opt/patchline/deploy/leave_node.py 110\n")):
        told = subprocess.run(shlex.split(stop), env=environment | {"PATH": os.defpath}, capture_output=True, text=True)
        assert told.stdout == expected


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_units_and_little_exposed(tmp_path) -> None:
    for path in (DEPLOY / "systemd").glob("*.service"):
        file = tmp_path / path.name.replace("@.", "@digits.")
        # systemd checks whether the programs exist.
        file.write_text(path.read_text().replace("/opt/patchline/.venv/bin/", f"{Path(sys.executable).parent}/"))
        told = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
        assert (told.returncode, told.stderr) == (0, ""), path.name
        told = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=25", file], capture_output=True, text=True
        )
        assert told.returncode == 0, told.stdout


def test_the_container_has_the_versions_that_were_tested() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert "torch===" in (ROOT / "constraints.txt").read_text()  # the build with CUDA, wherever it is installed
    assert "USER 1000:1000" in text
    assert "--constraint constraints.txt" in text
