"""The files of deploy/ hold what docs/ways-in.md promises; that they run is tests/test_slurm.py's business."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.errors import ExitCode
from jobs.submit.submission import STOP_GRACE_S

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
    """Return the specs of all pods that Ray runs in."""
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


def test_pods_are_no_root_have_no_privileges_and_share_the_run_directory() -> None:
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


def test_a_cluster_asks_for_a_token_that_no_file_holds() -> None:
    for cluster in clusters():
        assert cluster["authOptions"] == {"mode": "token", "secretName": "patchline-token"}
        assert cluster["rayVersion"] == PINNED["ray"]
    (container,) = manifest("submit.yaml")["spec"]["template"]["spec"]["containers"]
    token = {entry["name"]: entry for entry in container["env"]}["RAY_AUTH_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "patchline-token", "key": "auth_token"}}


def test_a_campaign_under_kueue_names_the_queue_and_the_class_that_the_manifest_makes_and_starts_suspended() -> None:
    kustomization = manifest("kustomization.yaml")
    assert kustomization["resources"] == ["kueue.yaml", "rayjob.yaml"]
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
    # Kueue wants both: it takes `suspend` away, and a cluster that outlives its job would keep its places.
    assert patch["spec"] == {"suspend": True} and job["spec"]["shutdownAfterJobFinishes"] is True


def test_a_submitted_campaign_is_tried_again_after_a_commit_and_not_after_a_mistake(tmp_path) -> None:
    job = manifest("submit.yaml")["spec"]
    (rule,) = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    again = {ExitCode.UNAVAILABLE, ExitCode.PREEMPTED}
    assert rule["onExitCodes"] == {"containerName": "submit", "operator": "NotIn", "values": sorted(again)}
    # The script itself, with a `python` that answers `submit` and `logs` with these codes.
    (container,) = job["template"]["spec"]["containers"]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = submit ] && exit $SUBMIT\n[ "$3" = logs ] && exit $LOGS\n')
    python.chmod(0o755)
    for submit, logs, expected in ((0, 0, 0), (0, 75, 75), (73, 75, 75), (73, 0, 0), (78, 0, 78), (69, 0, 69)):
        codes = {"SUBMIT": str(submit), "LOGS": str(logs), "RUN": "/shared/runs/digits"}
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | codes
        assert subprocess.run(container["command"], env=environment).returncode == expected, (submit, logs)


def test_the_slurm_script_is_a_shells_and_finds_its_driver_by_the_owners_file(tmp_path) -> None:
    path = DEPLOY / "slurm" / "train.sbatch"
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    script = path.read_text()
    assert f'"$code" -eq {ExitCode.PREEMPTED:d} ]' in script and "scontrol requeue" in script
    # As jobs/ownership.py writes it.
    (tmp_path / "owner.json").write_text(json.dumps({"host": "n1", "pid": 4711, "since": "now", "command": "a"}))
    (command,) = re.findall(r"\$\((sed -n .* \"\$run/owner.json\")\)", script)
    environment = os.environ | {"run": str(tmp_path)}
    said = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert said.stdout == "4711"


def test_the_container_has_the_versions_that_were_tested() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert "torch===" in (ROOT / "constraints.txt").read_text()  # the build with CUDA, wherever it is installed
    assert "USER 1000:1000" in text and "--constraint constraints.txt" in text
