"""The manifests of deploy/kuberay pass what an API server checks: strict schemas, and the expression rules in them.

    pip install cel-python kubernetes-validate       # in a separate environment: Patchline does not need them
    CRDS=FOLDER python -m pytest -m slow tests/test_manifests.py

FOLDER holds definitions of resources: KubeRay's `ray-operator/config/crd/bases/ray.io_{rayclusters,rayjobs}.yaml` of
one version, Kueue's `config/components/crd/bases/kueue.x-k8s.io_*.yaml`. Rules about a change (`oldSelf`) are left out,
as an API server does at a creation.
"""

import copy
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CRDS = os.environ.get("CRDS", "")
FOLDER = Path(__file__).parents[1] / "deploy" / "kuberay"
RULES = "x-kubernetes-validations"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CRDS, reason="CRDS names no folder of definitions")]


@functools.cache
def definitions() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas by apiVersion and kind."""
    schemas = {}
    for path in Path(CRDS).glob("*.yaml"):
        spec = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            schemas[key] = version["schema"]["openAPIV3Schema"]
    return schemas


def problems(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Find unknown fields, which an API server rejects, and broken rules; JSON Schema covers the rest."""
    celpy = pytest.importorskip("celpy")
    for rule in schema.get(RULES, []):
        if "oldSelf" not in rule["rule"]:
            environment = celpy.Environment()
            program = environment.program(environment.compile(rule["rule"]))
            if not program.evaluate({"self": celpy.json_to_cel(value)}):
                yield f"{where}: {rule['rule']}"
    if isinstance(value, list):
        for number, part in enumerate(value):
            yield from problems(part, schema["items"], f"{where}[{number}]")
    if isinstance(value, dict):
        for name, part in value.items():
            further = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(further, dict):
                yield from problems(part, further, f"{where}.{name}")
            elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f"{where}.{name}: unknown"


def plain(schema: Any) -> Any:
    """Convert a Kubernetes schema to JSON Schema."""
    if isinstance(schema, list):
        return [plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: plain(part) for name, part in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        schema.pop("type", None)
    return schema


def refusals(document: dict[str, Any]) -> list[str]:
    """Return the errors of a manifest; an empty list if it is accepted."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = definitions().get((document["apiVersion"], document["kind"]))
    if schema is None:
        validate = pytest.importorskip("kubernetes_validate")
        validate.validate(document, "1.31", strict=True)
        return []
    errors = jsonschema.Draft7Validator(plain(schema)).iter_errors(document)
    # Kubernetes has a separate schema for metadata.
    body = {name: part for name, part in document.items() if name != "metadata"}
    return [*(error.message for error in errors), *problems(body, schema, document["kind"])]


def documents() -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "Kustomization":  # read only by kubectl, not by a server
                yield document


def test_every_manifest_is_accepted() -> None:
    kinds = []
    for document in documents():
        assert refusals(document) == [], document["kind"]
        kinds.append(document["kind"])
    assert {"RayCluster", "RayJob", "Job", "ClusterQueue"} <= set(kinds)


def test_manifest_that_violates_a_rule_or_a_schema_is_refused() -> None:
    """The check above can fail: by a rule of each project, a wrong type, a wrong name."""
    by_kind = {document["kind"]: document for document in documents()}
    borrowing_alone = {"reclaimWithinCohort": "Never", "borrowWithinCohort": {"policy": "LowerPriority"}}
    table = (
        ("RayJob", "managedBy", "somebody", r"self in \['ray.io/kuberay-operator'"),
        ("RayJob", "deletionStrategy", {}, r"has\(self.onSuccess\)"),
        ("RayJob", "backoffLimit", "many", "'many' is not of type 'integer'"),
        ("RayCluster", "workers", [], "RayCluster.spec.workers: unknown"),
        ("ClusterQueue", "preemption", borrowing_alone, "reclaimWithinCohort"),
    )
    for kind, name, value, expected in table:
        document = copy.deepcopy(by_kind[kind])
        document["spec"][name] = value
        assert any(re.search(expected, text) for text in refusals(document)), (kind, name, refusals(document))
