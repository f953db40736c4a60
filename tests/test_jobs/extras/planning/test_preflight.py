"""`jobs preflight` with two real workers, and with problems that it must report."""

import os
import re

import models
from data.errors import ExitCode
from data.extras.reach import measure_reads
from jobs.__main__ import main

# ------------------------------------------------------------------------ real parts


def test_a_readable_set_is_measured_and_a_missing_set_is_an_error(shards) -> None:
    reach = measure_reads(str(shards / "train"))
    sizes = sorted((shards / "train").glob("*.tar"))
    chosen = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    assert reach["error"] == ""
    assert reach["bytes"] == sum(min(path.stat().st_size, 2**22) for path in chosen)
    assert "this index does not exist" in measure_reads(str(shards / "nowhere"))["error"]


def test_two_real_workers_are_checked_and_leave_nothing_behind(recipe, tmp_path, capsys) -> None:
    assert main(["preflight", str(recipe)]) == 0
    out = capsys.readouterr().out
    for subject in (
        "workers",
        "code",
        "versions",
        "GPUs",
        "all-reduce",
        "links",
        "run folder",
        "clocks",
        "disk",
        "data",
    ):
        assert re.search(rf"^OK   {subject} ", out, re.MULTILINE), out
    assert f"OK   workers     2 on 1 node ({os.uname().nodename}: 0,1), on cpu" in out
    # The fp32 gradients of pretraining, counted from the model; reduced twice because micro-batches are accumulated.
    parameters = sum(parameter.numel() for parameter in models.build("mu/8", 16, 10, dropout=0.1).parameters())
    assert f"pretrain: 2 × {4 * parameters / 1e3:.1f} kB of gradients" in out
    assert re.search(r"slowest 0–1 \(\S+, \S+\): [\d.]+ .B in [\d.]+ ms", out)
    assert not (tmp_path / "run").exists(), "a run directory that did not exist is removed again"


def test_an_unusable_run_directory_and_a_missing_set_are_failures(recipe, tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["preflight", str(recipe), f"run={tmp_path}/file/run"]) == ExitCode.CONFIG, "like plan and run"
    gone = tmp_path / "gone"
    assert main(["preflight", str(recipe), "cluster.gpus_per_worker=1", f"pretrain.data.evaluate={gone}"]) == 65
    out = capsys.readouterr().out
    assert re.search(rf"^FAIL inputs .*{gone}", out, re.MULTILINE)
    assert re.search(
        r"^FAIL workers     nothing was measured: 2 workers need 2 GPUs, but this machine has 0", out, re.M
    )
