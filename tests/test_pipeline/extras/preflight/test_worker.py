"""Reports of workers, and of nodes without a worker."""

import os
import resource
import socket

import pytest
import torch

from pipeline.extras.preflight.worker import examine_node, own_report

pytestmark = pytest.mark.quick


def test_node_without_a_worker_reports_its_disk_and_sets(tmp_path) -> None:
    report = examine_node({"folder": str(tmp_path / "run"), "is_shared": False, "sets": [str(tmp_path / "gone")]})
    assert report["identity"]["node"] == socket.gethostname()
    assert report["folder"] is not None
    assert report["folder"]["written_bytes"] == 2**24
    assert "this index does not exist" in report["sets"][str(tmp_path / "gone")]["error"]


def test_worker_reports_its_process_limits(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    report = own_report(torch.device("cpu"))
    assert report["interface"] == "eth7"
    assert report["machine"]["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert report["machine"]["gpu_memory_free"] is None
    status = os.statvfs("/dev/shm")
    assert report["machine"]["shm_free"] == pytest.approx(status.f_bavail * status.f_frsize, abs=2**28)
