"""Errors of a small, full or read-only disk name the path, the required space and the free space.

The disk is a real tmpfs, mounted in a separate namespace if the user is allowed to mount.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import models
from tests.support.recipes import TINY

ROOT = Path(__file__).parents[3]
IN_A_NAME_SPACE = ["unshare", "--map-root-user", "--mount"]
# Two workers, no evaluation; a checkpoint has 12 bytes per parameter (fp32 masters and Adam's two moments).
OPTIONS = "pretrain.data.evaluate=null pretrain.log_every=1 pretrain.save_every=4 pretrain.max_failed_saves=2"


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run([*IN_A_NAME_SPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


pytestmark = pytest.mark.skipif(not can_mount(), reason="needs Linux where a user may mount a tmpfs of his own")


def on_a_disk(size_kb: int, script: str, tmp_path: Path, shards: Path) -> str:
    """Return the output of a shell script, in which $disk is a disk of that size and $run pretrains in $disk/run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY.format(run=disk / "run", shards=shards).partition("resize:")[0])
    whole_script = (
        f"disk={disk}; mount -t tmpfs -o size={size_kb}k none $disk || exit 1\n"
        f"run='{sys.executable} -m jobs run {recipe} {OPTIONS}'\n"
        f"status='{sys.executable} -m jobs status {disk}/run'\n{script}"
    )
    done = subprocess.run(
        [*IN_A_NAME_SPACE, "sh", "-c", whole_script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


def parameters() -> int:
    model = models.build("mu/8", 16, 10)
    return sum(parameter.numel() for parameter in model.parameters())


def test_disk_too_small_for_the_checkpoints_is_refused_before_the_run(tmp_path: Path, shards: Path) -> None:
    size_kb = 3 * 12 * parameters() // 1000  # three checkpoints fit; keep=3 needs four, and the weights
    said = on_a_disk(size_kb, "$run; echo code $?; $status; ls $disk/run/pretrain-*", tmp_path, shards)
    assert "code 74" in said, said
    needed = re.search(r"error: ([\d.]+) MB are needed under (\S+) \(4 check.* ([\d.]+) (k|M)B are free", said)
    assert needed is not None, said
    # Four checkpoints and the weights, calculated by hand; each checkpoint has a few kB of headers.
    assert float(needed[1]) == pytest.approx((4 * 12 + 4) * parameters() / 1e6, rel=0.1)
    assert needed[2].startswith(str(tmp_path / "disk/run/pretrain-"))
    assert "lower keep, or use another disk: run=/elsewhere" in said
    assert f"{needed[1]} MB are needed under" in said.partition("code 74")[2], "status tells the same"
    assert "attempts" not in said.partition("code 74")[2], "no worker was started"


def test_disk_that_fills_up_ends_the_run_and_status_reports_path_and_bytes(tmp_path, shards) -> None:
    script = (
        "$run pretrain.steps=100000 & pid=$!\n"
        "until ls $disk/run/pretrain-*/checkpoints/step-* >/dev/null 2>&1; do sleep 0.1; done\n"
        # Fill it repeatedly, because the commit in flight deletes an older checkpoint and frees space.
        "while kill -0 $pid 2>/dev/null; do cat /dev/zero >> $disk/ballast 2>/dev/null; sleep 0.1; done\n"
        "wait $pid; echo code $?; $status; rm $disk/ballast; $status\n"
    )
    said = on_a_disk(8 * 12 * parameters() // 1000 + 1000, script, tmp_path, shards)
    assert "code 74" in said, said
    assert re.search(r"checkpoint step \d+ FAILED \(rank-00000.safetensors: No space left on device: \S+", said), said
    end = re.search(
        r"error: pretrain: 2 consecutive saves failed, the last with: .*\(([\d.]+) kB needed, ([\d.]+) kB free\)", said
    )
    assert end is not None, said
    assert float(end[2]) < float(end[1]), "the first save that failed may have left some room behind"
    assert "free space under" in said
    assert "then run the same command again" in said
    assert said.count("end  pretrain: 2 consecutive saves failed") == 2, "status tells it, on the full disk and after"
    assert "killed, or lost with its machine" not in said
    assert "without a word" not in said


def test_read_only_disk_is_reported_with_a_remedy(tmp_path: Path, shards: Path) -> None:
    said = on_a_disk(1000, "mount -o remount,ro $disk; $run; echo code $?", tmp_path, shards)
    assert "code 74" in said, said
    assert f"error: Read-only file system: {tmp_path}/disk/run" in said
    assert f"run findmnt -T {tmp_path}/disk to see the mount, or use another disk: run=/elsewhere" in said
