"""Checks of worker reports against the requirements of a campaign; expected values are computed by hand."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from data.errors import ExitCode
from jobs.extras.planning.checks import GROUP, NODES
from jobs.extras.planning.checks import results as results_of
from jobs.extras.planning.cluster_checks import ClusterFacts, Requirements, StageRequirements
from jobs.resolved_recipe import CheckResult
from pipeline.extras.preflight import folder as folders

pytestmark = pytest.mark.quick

STAGE = StageRequirements(
    name="pretrain",
    gradient_bytes=344_000_000,
    reductions=2.0,
    compute_s=1.0,
    memory_bytes=2 * 10**9,
    snapshot_bytes=10**9,
    checkpoint_bytes=3 * 10**9,
    disk_bytes=12 * 10**9,
)
REQUIREMENTS = Requirements(
    workers=3, gpus_per_worker=0, code="a" * 64, stages=[STAGE], sets={"/data": 10e6}, not_made=["/run/packed"]
)


def report() -> Any:
    """The reports of three workers on three nodes without problems."""
    packages = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "ray": "2.60.0", "numpy": "2.3.0"}
    folder = {"sees_driver": True, "is_answered": True, "skew_s": 0.002, "uncertainty_s": 0.004, "lacks": []}
    folder |= {"written_bytes": 2**24, "written_s": 0.1, "free_bytes": 10**11}
    machine = {"memory_free": 10**10, "shm_free": 10**10, "open_files": 10_000, "gpus_present": 0}
    workers = []
    for rank in range(3):
        identity = {"rank": rank, "node": f"n{rank}", "root": "/p", "code": "a" * 64, "packages": dict(packages)}
        worker = {"identity": {**identity, "device": "cpu", "driver": ""}, "folder": dict(folder), "interface": "eth0"}
        worker |= {"machine": {**machine, "gpu_memory_free": None}}
        worker |= {"sets": {"/data": {"bytes": 4_000_000, "seconds": 0.1, "error": ""}}}
        workers.append(copy.deepcopy(worker))
    pairs = [{"ranks": ranks, "latency_s": 0.0001, "seconds": 0.02} for ranks in ([0, 1], [0, 2], [1, 2])]
    network = {"latency_s": 0.0002, "bytes": 2**24, "seconds": 0.01, "message_bytes": 2**20, "pairs": pairs}
    return {"workers": workers, "spares": [], "network": {**network, "all_pairs": True}}


def check_report(reported: Any, requirements: Requirements) -> list[CheckResult]:
    return results_of("preflight", ClusterFacts(reported, requirements), GROUP, NODES)


def of(results: list[CheckResult], subject: str) -> CheckResult:
    """The result for a subject; the worst if there are several."""
    here = [result for result in results if result.subject == subject]
    return max(here, key=lambda result: ["OK", "WARN", "FAIL"].index(result.level))


def test_a_healthy_cluster_passes_all_checks_and_shows_its_figures() -> None:
    results = check_report(report(), REQUIREMENTS)
    text = "\n".join(f"{result.level:4} {result.subject:11} {result.text}" for result in results)
    assert {result.level for result in results} == {"OK"}, text
    # 16.8 MB in 10 ms are 1.7 GB/s; 344 MB twice, and the latency, are 410 ms; 3 × 16.8 MB in 0.1 s are 503 MB/s.
    for figure in (
        "1.7 GB/s",
        "about 410 ms per step, 41% of the step's compute time of 1.0 s assumed by plan",
        "503.3 MB/s",
        "about 6.0 s",
    ):
        assert figure in text, f"{figure} in\n{text}"
    for figure in ("100.0 GB free, 12.0 GB needed", "9.3 GiB free on n0 for 1 worker, about 2.8 GiB", "40.0 MB/s on"):
        assert figure in text, f"{figure} in\n{text}"
    assert "/run/packed: not checked" in text


def check_changed(change: str) -> list[CheckResult]:
    """Check the reports of three workers after one change: "workers.1.machine.shm_free = 7"."""
    changed = report()
    path, _, value = change.partition(" = ")
    *names, last = path.split(".")
    place = changed
    for name in names:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = json.loads(value)
    return check_report(changed, REQUIREMENTS)


@pytest.mark.parametrize(
    ("change", "subject", "level", "text"),
    [
        ('workers.1.identity.code = "b"', "code", "FAIL", "worker 1 on n1 runs different code from this command"),
        ('workers.2.identity.packages.torch = "2.12"', "versions", "FAIL", "worker 2 on n2 has torch 2.12, 2 of 3"),
        ('workers.2.identity.packages.numpy = "2.2"', "versions", "WARN", "worker 2 on n2 has numpy 2.2"),
        ('workers.1.identity.device = "H100"', "workers", "WARN", "worker 1 on n1 has device H100"),
        ('workers.1.identity.driver = "550.1"', "workers", "WARN", "has GPU driver 550.1"),
        ("workers.1.machine.gpus_present = 8", "GPUs", "WARN", "0 requested, 8 on the workers' nodes"),
        ("workers.1.folder.sees_driver = false", "run folder", "FAIL", "worker 1 on n1 does not see the driver"),
        ("workers.1.folder.is_answered = false", "run folder", "FAIL", "the driver does not see the files of worker 1"),
        ('workers.0.folder.lacks = ["no locks"]', "run folder", "FAIL", "worker 0 on n0: no locks"),
        ("workers.2.folder.skew_s = -2.5", "clocks", "WARN", "worker 2 on n2 is 2.5 s behind the driver's, ±"),
        ("workers.2.folder.skew_s = null", "clocks", "WARN", "not measured"),
        ("workers.2.folder.free_bytes = 100", "disk", "FAIL", "0.1 kB free, 12.0 GB needed"),
        ("workers.2.folder.written_s = 10", "disk speed", "WARN", "a checkpoint of 3.0 GB takes about 596.0 s"),
        ("workers.1.machine.memory_free = 1000000000", "memory", "WARN", "953.7 MiB free on n1 for 1 worker, about"),
        ("workers.1.machine.shm_free = 10000000", "/dev/shm", "WARN", "9.5 MiB free on n1"),
        ("workers.1.machine.shm_free = null", "/dev/shm", "OK", "free on n0"),
        ("workers.1.machine.open_files = 256", "open files", "WARN", "256 for a worker on n1, about 536 needed"),
        ('workers.1.sets./data.error = "gone"', "data", "FAIL", "worker 1 on n1 cannot read /data: gone"),
        ("workers.1.sets./data.seconds = 1", "data", "WARN", "4.0 MB/s on n1, the slowest of 3 nodes; needed"),
        ("network.seconds = 0.1", "reduction", "WARN", "4.1 s per step, 410% of the step's compute time of 1.0 s"),
        ("network.pairs.1.seconds = 0.5", "links", "WARN", "slowest 0–2 (n0, n2): 1.0 MB in 500 ms"),
    ],
)  # fmt: skip
def test_a_problem_is_reported_with_its_place_and_a_remedy(change, subject, level, text) -> None:
    result = of(check_changed(change), subject)
    assert (result.level, text in result.text) == (level, True), result
    assert (result.exit_code != ExitCode.DONE) == (level == "FAIL")
    others = [other for other in check_changed(change) if other.subject != subject]
    assert {other.level for other in others} == {"OK"}, others


@pytest.mark.parametrize(("uncertainty_s", "level"), [(0.1, "WARN"), (2.0, "OK")])
def test_a_clock_is_off_if_its_skew_exceeds_the_uncertainty(uncertainty_s: float, level: str) -> None:
    changed = report()
    changed["workers"][2]["folder"] |= {"skew_s": -2.5, "uncertainty_s": uncertainty_s}
    assert of(check_report(changed, REQUIREMENTS), "clocks").level == level


@pytest.mark.parametrize(
    ("gpus", "free", "level"),
    [(0, 2**26, "OK"), (0, 2**26 - 1, "WARN"), (1, 2**30, "OK"), (1, 2**30 - 1, "WARN")],
)
def test_shared_memory_suffices_as_docker_and_nccl_recommend(gpus: int, free: int, level: str) -> None:
    changed = report()
    for worker in changed["workers"]:
        worker["machine"]["shm_free"] = free
    requirements = dataclasses.replace(REQUIREMENTS, gpus_per_worker=gpus)
    assert of(check_report(changed, requirements), "/dev/shm").level == level


@pytest.mark.parametrize(("seconds", "level"), [(0.2, "WARN"), (0.1, "OK")])
def test_the_workers_of_a_node_share_its_reading_rate(seconds: float, level: str) -> None:
    """Three workers need 30 MB/s; the node reads 20 or 40 MB/s."""
    changed = report()
    for worker in changed["workers"]:
        worker["identity"]["node"] = "n0"
        worker["sets"]["/data"]["seconds"] = seconds
    result = of(check_report(changed, REQUIREMENTS), "data")
    assert "needed by its 3 workers: 30.0 MB/s" in result.text
    assert result.level == level


def test_a_minority_of_versions_can_be_excluded_but_a_tie_cannot() -> None:
    excluded = "a run excludes the node if the others have enough room"
    assert excluded in of(check_changed('workers.2.identity.packages.torch = "2.12"'), "versions").remedy
    tie = report()
    tie["workers"] = tie["workers"][:2]
    tie["network"] = None
    tie["workers"][1]["identity"]["packages"]["torch"] = "2.12"
    result = of(check_report(tie, REQUIREMENTS), "versions")
    assert (result.level, excluded in result.remedy) == ("FAIL", False)


def test_memory_is_a_warning_if_the_step_could_not_be_traced() -> None:
    needs = dataclasses.replace(REQUIREMENTS, stages=[dataclasses.replace(STAGE, memory_bytes=None)])
    result = of(check_report(report(), needs), "memory")
    assert result.level == "WARN"
    assert "not included: pretrain, whose steps could not be traced" in result.text


def test_a_run_in_an_object_store_needs_no_shared_folder(tmp_path) -> None:
    own = folders.report_on(tmp_path / "here", "1", is_shared=False)
    assert own["written_bytes"] == 2**24
    assert own["free_bytes"] > 0
    assert not (tmp_path / "here").exists()
    changed = report()
    for worker in changed["workers"]:
        worker["folder"] = own
    needs = dataclasses.replace(REQUIREMENTS, is_shared=False, stages=[])
    results = check_report(changed, needs)
    assert (of(results, "run folder").level, of(results, "clocks").level) == ("OK", "OK")
    assert of(results, "clocks").text.startswith("not measured")


@pytest.mark.parametrize(
    ("change", "subject", "text"),
    [
        ({"identity": {"code": "b"}}, "code", "node n9 runs different code from this command"),
        ({"folder": {"sees_driver": False}}, "run folder", "not shared: node n9 does not see"),
        ({"sets": {"/data": {"error": "gone"}}}, "data", "node n9 cannot read /data: gone"),
        ({"machine": {"open_files": 256}}, "open files", "256 for a worker on n9, about 536 needed"),
    ],
)
def test_a_node_without_a_worker_is_checked_too(change, subject, text) -> None:
    changed = report()
    spare = report()["workers"][0]
    spare["identity"] |= {"rank": -1, "node": "n9"}
    changed["spares"].append(spare)
    results = check_report(changed, REQUIREMENTS)
    assert {result.level for result in results} == {"OK"}
    assert of(results, "workers").text == "3 on 3 nodes (n0: 0, n1: 1, n2: 2), on cpu; 1 spare node checked too"

    for part, values in change.items():
        for key, value in values.items():
            spare[part][key] = value if not isinstance(value, dict) else spare[part][key] | value
    result = of(check_report(changed, REQUIREMENTS), subject)
    assert result.level != "OK"
    assert text in result.text


def test_the_node_shared_by_several_slow_pairs_is_named() -> None:
    changed = report()
    changed["network"]["pairs"][1]["seconds"] = 0.5  # 0–2
    changed["network"]["pairs"][2]["seconds"] = 0.4  # 1–2
    result = of(check_report(changed, REQUIREMENTS), "links")
    assert "slowest 0–2 (n0, n2)" in result.text
    assert "2 pairs are up to 25 × as slow" in result.text
    assert result.remedy.startswith("check n2's cable")


def test_missing_gpus_are_a_failure() -> None:
    needs = Requirements(3, gpus_per_worker=1, code="a" * 64, stages=[], sets={})
    result = of(check_report(report(), needs), "GPUs")
    assert (result.level, result.exit_code) == ("FAIL", ExitCode.UNAVAILABLE)
    assert "3 requested, 0 on the workers' nodes; without a GPU: worker 0 on n0 (and 2 more)" in result.text
