"""`make gpu-bundle`: the package versions, the size limit for transfers, and the unpacking on the GPU machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import bundle

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]


def test_wheel_versions_equal_the_constraints():
    constraints = (ROOT / "constraints.txt").read_text()
    for name in [*bundle.WHEELS, "deepspeed"]:
        _, _, version = bundle.pinned(name, constraints).partition("==")
        assert version[0].isdigit()
    assert bundle.pinned("typing-inspection", "typing_inspection==0.4\ntyping==1") == "typing-inspection==0.4"
    assert bundle.pinned("torch", "torch===2.13.0") == "torch==2.13.0"
    with pytest.raises(SystemExit, match="pins no nonsense"):
        bundle.pinned("nonsense", constraints)


def test_bundle_is_too_large_from_the_limit(capsys):
    assert bundle.report_size(20 << 20, 44 << 20) == 0
    assert "checkout 20.0 MiB + .gpu 44.0 MiB = 64.0 MiB (limit 64 MiB)" in capsys.readouterr().out
    assert bundle.report_size(20 << 20, (44 << 20) + 1) == 1
    assert "too large to be copied" in capsys.readouterr().out


def test_checkout_contains_tracked_and_addable_files(tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").write_bytes(bytes(1000))
    (tmp_path / "new").write_bytes(bytes(10))
    assert bundle.bytes_of_checkout(tmp_path) == 10 + len("ignored\n")


def test_unused_parts_are_removed_and_the_ray_command_is_added(tmp_path, monkeypatch):
    for name in [*bundle.PROGRAMS, "ray/_raylet.so", "ray/jars/ray.jar", "ray/dashboard/client/a.js", "ray/stub.pyi"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    monkeypatch.setattr(bundle.shutil, "which", lambda name: None)  # a machine without strip
    bundle.trim(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*bundle.PROGRAMS, "ray/_raylet.so", bundle.DASHBOARD_PAGE, "bin/ray"}
    assert os.access(tmp_path / "bin" / "ray", os.X_OK)


def test_python_and_its_children_find_the_unpacked_packages(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    (packages / "bin").mkdir(parents=True)
    (packages / "carried.py").write_text("VALUE = 7\n")
    (packages / "bin" / "carried").write_text("#!/bin/sh\necho found\n")
    (packages / "bin" / "carried").chmod(0o755)
    folder = tmp_path / ".gpu"
    folder.mkdir()
    bundle.write_archive(packages, folder / "site.tar.gz")
    first = (folder / "site.tar.gz").read_bytes()
    bundle.write_archive(packages, folder / "site.tar.gz")
    assert (folder / "site.tar.gz").read_bytes() == first

    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.setattr(bundle.site, "getsitepackages", lambda: [str(site)])
    environment = bundle.unpack(folder, tmp_path / "target")
    code = "import carried, subprocess; print(carried.VALUE, subprocess.check_output('carried', text=True))"
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["7", "found"]
    # A process with a PYTHONPATH of its own finds it by the .pth file.
    assert (site / bundle.PTH_NAME).read_text() == f"{tmp_path / 'target'}\n"
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_missing_bundle_raises_an_error_with_the_command_to_build_one(tmp_path):
    with pytest.raises(SystemExit, match="make gpu-bundle"):
        bundle.unpack(tmp_path, tmp_path / "target")
