"""Differences between workers and nodes: the majority of the nodes decides, and a tie is reported as one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from data.errors import ConfigError
from pipeline import identity
from pipeline.identity import (
    DEVICE,
    MUST_BE_EQUAL,
    NO_RANK,
    WORKERS_PER_GPU,
    code_mismatch,
    differences,
    workers_per_gpu,
)
from tests.support.identities import worker

ROOT = Path(__file__).parents[2]


def torch(*versions: str) -> list[Any]:
    """Return workers with these versions of torch, "a" to "z", each on a separate node."""
    return [worker(rank, packages={"torch": version}) for rank, version in enumerate(versions)]


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (torch("a", "a", "b"), "worker 2 on n2 has torch b, 2 of 3 nodes have a"),
        ([{**torch("b")[0], "rank": NO_RANK}, *torch("a", "a", "a")[1:]], "node n0 has torch b, 2 of 3 nodes have a"),
        (torch("b", "a", "a"), "worker 0 on n0 has torch b, 2 of 3 nodes have a"),
        (torch("b", "a", "c", "a", "b", "a"), "worker 0 on n0 (and 2 more) has torch b, 3 of 6 nodes have a"),
        (torch("a", "b"), "worker 1 on n1 has torch b, worker 0 on n0 a: a tie, each on 1 of 2 nodes"),
        (torch("b", "b", "a", "a", "c"), "worker 2 on n2 (and 2 more) has torch a, worker 0 on n0 b: a tie, each on 2"),
        # Eight workers on one node count as one node.
        (
            [{**each, "node": "n0"} for each in torch(*"bbbbbbbb")] + torch(*"aaaaaaaaaaa")[8:],
            "worker 0 on n0 (and 7 more) has torch b, 3 of 4 nodes have a",
        ),
        # A node without a worker counts too.
        ([*torch("a", "b"), {**torch("b")[0], "rank": NO_RANK, "node": "s"}], "worker 0 on n0 has torch a, 2 of 3"),
    ],
)  # fmt: skip
def test_difference_names_the_minority_of_the_nodes(workers, said) -> None:
    (difference,) = differences(workers, MUST_BE_EQUAL)
    assert str(difference).startswith(said)
    assert difference.is_tie == ("a tie" in said)


def test_different_code_and_devices_are_reported() -> None:
    group = [worker(0), worker(1, code="b" * 64), worker(2, code="c" * 64)]
    assert code_mismatch(group, "a" * 64) == (
        "worker 1 on n1 (and 1 more) runs different code from this command: bbbbbbbbbbbb in /p, expected aaaaaaaaaaaa"
    )
    devices = [worker(0, device="H100", driver="550"), worker(1, device="A100"), worker(2, device="H100")]
    assert [str(difference) for difference in differences(devices, DEVICE)] == [
        "worker 1 on n1 has device A100, 2 of 3 nodes have H100",
        "worker 0 on n0 has GPU driver 550, 2 of 3 nodes have none",
    ]


def test_gpu_driver_version_is_read_from_proc(tmp_path, monkeypatch) -> None:
    path = tmp_path / "version"
    monkeypatch.setattr(identity, "NVIDIA_DRIVER", path)
    assert identity.identity("cpu")["driver"] == ""
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC …")
    assert identity.identity("cpu")["driver"] == "550.54.15"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (x)")
    assert identity.identity("cpu")["driver"] == "570.86.10"


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("2", 2), ("0", None), ("two", None), ("-1", None)])
def test_workers_share_a_gpu_if_the_environment_allows_it(text, expected, monkeypatch) -> None:
    monkeypatch.setenv(WORKERS_PER_GPU, text)
    if expected is not None:
        assert workers_per_gpu() == expected
        return
    with pytest.raises(ConfigError, match=rf"^{WORKERS_PER_GPU} is '{text}', expected a positive integer\n"):
        workers_per_gpu()


@pytest.mark.parametrize("source", ["data/images/jpeg.cpp", "data/order.py", "models/extras/weights/npz.py"])
def test_changed_source_changes_the_code_version(source, tmp_path, monkeypatch) -> None:
    for package in identity.PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    unchanged = identity.code_version.__wrapped__()
    assert unchanged == identity.code_version()  # independent of the checkout's location
    with open(tmp_path / source, "a") as file:
        file.write("\n")
    assert identity.code_version.__wrapped__() != unchanged
