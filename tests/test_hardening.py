"""The files in deploy/ follow the advice of the linters for their formats: kube-linter, checkov, systemd-analyze."""

import configparser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
RAY_NODES = {"ray.io/is-ray-node": "yes"}

pytestmark = pytest.mark.quick


def documents() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "kuberay").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Find every pod specification: a mapping with containers."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for part in value.values():
            yield from pods(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods(part)


POD_SPECS = [pod for document in documents() for pod in pods(document)]


def test_there_are_five_kinds_of_pods() -> None:
    """A cluster's head and workers, a job's head and workers, and the submitting pod."""
    assert len(POD_SPECS) == 5


@pytest.mark.parametrize("pod", POD_SPECS)
def test_container_has_a_pinned_image_and_no_privileges(pod) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert re.fullmatch(r"[a-z0-9./-]+@sha256:[0-9a-f]{64}", container["image"])
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


def test_only_the_head_with_the_autoscaler_gets_a_service_account_token() -> None:
    with_token = [pod for pod in POD_SPECS if pod["automountServiceAccountToken"] is not False]
    cluster = next(document for document in documents() if document["kind"] == "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    assert with_token == [cluster["spec"]["headGroupSpec"]["template"]["spec"]]


def test_network_policies_admit_only_ray_submitting_pods_and_the_operator() -> None:
    policies = {
        document["metadata"]["name"]: document["spec"] for document in documents() if "Policy" in document["kind"]
    }
    policies = {name: spec for name, spec in policies.items() if "podSelector" in spec}
    ray, submit = policies["patchline-ray"], policies["patchline-submit"]
    assert ray["podSelector"]["matchLabels"] == RAY_NODES
    assert submit["policyTypes"] == ray["policyTypes"] == ["Ingress"]
    assert "ingress" not in submit
    anywhere, dashboard = ray["ingress"]
    assert anywhere == {"from": [{"podSelector": {"matchLabels": RAY_NODES}}]}
    assert dashboard["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert all("podSelector" in source for source in dashboard["from"])
    job = next(document for document in documents() if document["kind"] == "Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert {"podSelector": {"matchLabels": labels}} in dashboard["from"]


def test_kustomization_includes_the_network_policies() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kuberay" / "kustomization.yaml").read_text())
    assert "networkpolicy.yaml" in kustomization["resources"]


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_unit_has_a_private_tmp_that_a_driver_shares_with_ray(path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    service = unit["Service"]
    assert service["PrivateTmp"] == "yes"
    assert "/tmp" not in service["ReadWritePaths"].split()
    assert service["SystemCallFilter"].startswith("~@clock ")
    # Without this, the driver would not find the sockets of Ray in /tmp/ray.
    if "driver" in path.name:
        assert unit["Unit"]["JoinsNamespaceOf"].split() == ["patchline-head.service", "patchline-node.service"]
