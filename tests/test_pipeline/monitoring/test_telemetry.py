"""What a run says, and how it is read back."""

import fcntl
import json
import math
import os
import socket
import time
from pathlib import Path

import pytest
import torch

from data.errors import UsageError, exit_code
from jobs import terminal
from jobs.cluster.failure import WorkerGroupError
from jobs.commands.status import status
from jobs.run.log import RunLog, log_table, write_status
from pipeline.monitoring.telemetry import (
    Telemetry,
    Window,
    amount,
    duration,
    last_metrics,
    log_line,
    memory_gb,
    read_metrics,
)
from pipeline.process_group import Place, describe_network

pytestmark = pytest.mark.quick

REPORT = {"step": 120_000, "steps": 700_000, "loss": 2.841, "lr": 7.1e-4, "grad_norm": 0.42, "images_per_s": 41_200.0}
REPORT |= {"world": 16, "mfu": 0.47, "wait": 0.008, "memory_gb": 61.0, "eta_s": 3.2 * 86400, "losses": [2.9, 2.841]}
REPORT |= {"seconds": 24.0, "stalled_s": 0.5, "evaluated_s": 0.0}


@pytest.mark.parametrize(
    ("backend", "settings", "expected"),
    [
        ("gloo", [("n1", "GLOO_SOCKET_IFNAME=eth0"), ("n2", "GLOO_SOCKET_IFNAME=eth0")], "gloo over eth0"),
        (
            "gloo",
            [("n1", "GLOO_SOCKET_IFNAME=eth0"), ("n1", "GLOO_SOCKET_IFNAME=eth0"), ("n2", "GLOO_SOCKET_IFNAME=ib0")],
            "gloo over eth0 on n1, ib0 on n2",
        ),
        (
            "nccl",
            [("n1", "GLOO_SOCKET_IFNAME=e"), ("n2", "GLOO_SOCKET_IFNAME=e")],
            "NCCL over the interface that it picks",
        ),
        (
            "nccl",
            [("n1", "NCCL_SOCKET_IFNAME=ib0 NCCL_DEBUG=INFO"), ("n2", "NCCL_SOCKET_IFNAME=ib0")],
            "NCCL over ib0; NCCL_DEBUG=INFO on n1, not set on n2",
        ),
        ("nccl", [(f"n{node}", f"NCCL_SOCKET_IFNAME=e{node}") for node in range(10)], None),
    ],
)
def test_the_network_line_names_interfaces_and_settings(backend, settings, expected) -> None:
    places = [Place(node, dict(word.split("=") for word in text.split())) for node, text in settings]
    line = describe_network(backend, places).replace("; GLOO_SOCKET_IFNAME=e", "")
    if expected is None:
        shown = ", ".join(f"e{node} on n{node}" for node in range(8))
        expected = f"NCCL over {shown} and 2 nodes more"
    assert line == f"network: {expected}"


def test_the_log_line_has_one_order_and_human_numbers():
    assert log_line(REPORT) == (
        "step 120000/700000  loss 2.8410  lr 7.1e-04  grad 0.42  img/s 41.2k (2.6k/worker)  mfu 0.47  wait 0.8%  "
        "mem 61.0G  eta 3d04h"
    )
    assert "mfu" not in log_line(REPORT | {"mfu": None})


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (65, "1m05s"), (7500, "2h05m"), (273_600, "3d04h")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_memory_is_the_most_that_was_ever_held(monkeypatch):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert memory_gb() == pytest.approx(int(status["VmHWM"].removesuffix("kB")) / 2**20, rel=0.02)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    assert memory_gb() == 3.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.34, "12.3"), (384, "384"), (384.25, "384"), (41_234, "41.2k"), (4.2e9, "4.2G")],
)
def test_amounts_are_short(value, text):
    assert amount(value) == text


def test_a_torn_last_line_is_left_out_and_the_newest_record_is_found_from_the_tail(tmp_path: Path):
    telemetry = Telemetry(tmp_path, rank=0, attempt=3)
    for step in range(1, 5):
        telemetry.report("train", REPORT | {"step": step})
    telemetry.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    last = last_metrics(tmp_path)
    assert last is not None and (last["step"], last["attempt"]) == (4, 3)
    assert last_metrics(tmp_path / "nothing") is None


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_to_its_readers(tmp_path: Path):
    telemetry = Telemetry(tmp_path, rank=0, attempt=1)
    recent = [{"step": 6, "loss": math.inf, "grad_norm": math.nan}]
    telemetry.report("train", REPORT | {"loss": math.nan, "losses": [1.5, math.inf], "mfu": None})
    telemetry.report("spike", {"step": 7, "grad_norm": -math.inf, "recent": recent})
    telemetry.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 8, "loss": NaN, "losses": [Infinity]}\n')  # as it was written before

    first, second, _ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"loss": null' in first and '"losses": [1.5, null]' in first
    assert '"grad_norm": null, "recent": [{"step": 6, "loss": null, "grad_norm": null}]' in second

    train, older = read_metrics(tmp_path)
    assert math.isnan(train["loss"]) and train["losses"][0] == 1.5 and math.isnan(train["losses"][1])
    assert train["mfu"] is None and "loss nan" in log_line(train)
    assert math.isnan(older["loss"]) and older["losses"] == [math.inf]
    (spike,) = read_metrics(tmp_path, "spike")
    assert math.isnan(spike["grad_norm"]) and math.isnan(spike["recent"][0]["grad_norm"])


def test_a_line_tells_the_speed_of_all_steps_since_the_line_before() -> None:
    """A save after 2 of 5 steps ended a record: the line's 50 images took 10 s, not the last 30 images 4 s."""
    since_line = Window()
    before_save = Window()
    before_save.losses = [3.0, 2.9]
    before_save.norms = [0.5, 0.4]
    before_save.evaluated_s = 1.0
    after_save = Window()
    after_save.losses = [2.8, 2.7, 2.6]
    after_save.norms = [0.3, 0.3, 0.2]
    now = time.monotonic()
    before_save.since = now - 11
    after_save.since = now - 4
    since_line.extend(before_save)
    since_line.extend(after_save)
    values = since_line.values(samples=50, flops=0.0, peak=None, steps_left=5)
    assert values["images_per_s"] == pytest.approx(50 / 10, rel=0.01)
    assert values["losses"] == [3.0, 2.9, 2.8, 2.7, 2.6] and values["grad_norm"] == 0.2
    assert values["eta_s"] == pytest.approx(10, rel=0.01)


def test_only_rank_0_reports_and_every_worker_may_say(tmp_path: Path):
    other = Telemetry(tmp_path, rank=2, attempt=1)
    other.report("train", REPORT)
    other.log("bad sample 1 replaced: a.tar 7: no JPEG")
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "log.txt").read_text() == "[worker 2] bad sample 1 replaced: a.tar 7: no JPEG\n"


def test_the_driver_shows_every_whole_line_once(tmp_path: Path, capsys):
    attempt = tmp_path / "pretrain-1" / "attempts" / "attempt-000001"
    attempt.mkdir(parents=True)
    log = tmp_path / "pretrain-1" / "log.txt"
    run_log = RunLog()
    log.write_text("one\ntwo\nthr")
    run_log.poll(attempt, 1)
    log.write_text("one\ntwo\nthree\n")
    run_log.poll(attempt, 1)
    assert capsys.readouterr().out == "[pretrain-1] one\n[pretrain-1] two\n[pretrain-1] three\n"


def test_the_drivers_lines_are_in_the_log_of_its_stage_and_are_shown_once(tmp_path: Path, capsys):
    attempt = tmp_path / "pretrain-1" / "attempts" / "attempt-000003"
    attempt.mkdir(parents=True)
    log = tmp_path / "pretrain-1" / "log.txt"
    run_log = RunLog()
    run_log("pretrain: skipped")
    run_log.stage_file = log
    Telemetry(tmp_path / "pretrain-1", rank=1, attempt=3).log("bad sample 1 replaced")
    run_log("SIGTERM: finishing the step\n  Ctrl-C again ends at once")
    run_log.poll(attempt, 3)
    assert log.read_text() == (
        "[worker 1] bad sample 1 replaced\n[driver] SIGTERM: finishing the step\n[driver]   Ctrl-C again ends at once\n"
    )
    assert capsys.readouterr().out == (
        "pretrain: skipped\nSIGTERM: finishing the step\n  Ctrl-C again ends at once\n"
        "[pretrain-1] [worker 1] bad sample 1 replaced\n"
    )


def test_lines_that_a_stuck_terminal_misses_are_counted_and_said(monkeypatch):
    monkeypatch.setattr(terminal, "CLOSE_S", 0.2)
    monkeypatch.setattr(terminal, "MOST_WAITING", 10)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4095 + b"\n")
    with open(writer, "w") as stream:
        stuck = terminal.Terminal(stream)
        stuck.write("line 0")
        while not stuck.waiting.empty():  # the thread has it, and cannot get rid of it
            time.sleep(0.01)
        for number in range(1, 31):
            stuck.write(f"line {number}")
        assert stuck.close() == 31
        # Somebody scrolls on, and what has waited comes.
        os.read(reader, 4096)
        stuck.thread.join(10)
        shown = os.read(reader, 4096).decode().splitlines()
    os.close(reader)
    notice = "(20 lines are not shown: this terminal took none; log.txt has them)"
    assert shown == ["line 0", notice, *(f"line {number}" for number in range(1, 11))]


def test_a_wait_is_said_once_with_its_limit_and_signs_of_life_do_not_fill_the_log(tmp_path: Path, capsys):
    attempt = tmp_path / "pretrain-1" / "attempts" / "attempt-000003"
    attempt.mkdir(parents=True)
    run_log = RunLog(start_timeout_s=300.0)
    run_log.stage_file = tmp_path / "pretrain-1" / "log.txt"

    def looks(count: int) -> list[str]:
        for _ in range(count):
            run_log.spoke -= 11.0  # as if nothing had been said for so many seconds
            run_log.poll(attempt, 3)
        return capsys.readouterr().out.splitlines()

    waiting = "[pretrain-1] waiting for the workers to start, for up to 5m00s (cluster.start_timeout_s)"
    assert looks(5) == [waiting]
    (attempt / "rank-00000.json").write_text("{}")
    assert looks(5) == ["[pretrain-1] 1 workers are up, waiting for the first step"]
    Telemetry(tmp_path / "pretrain-1", rank=0, attempt=3).report("train", REPORT)
    assert len(looks(3)) == 3, "signs of life"
    assert run_log.stage_file.read_text().splitlines() == [
        f"[driver] {waiting}",
        "[driver] [pretrain-1] 1 workers are up, waiting for the first step",
    ]


def test_tensorboard_opens_on_the_loss(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    telemetry = Telemetry(tmp_path, rank=0, attempt=1)
    for kind in ("train", "checkpoint", "effective", "evaluate"):
        telemetry.report(kind, REPORT | {"took_s": 1.0, "accuracy": 0.9})
    telemetry.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curves = sorted(events.Tags()["scalars"])  # as TensorBoard's page has them
    assert curves[0] == "1 train/1 loss" and "2 evaluate/accuracy" in curves and "checkpoint/took_s" in curves


def test_status_of_a_stages_folder_is_that_stages(tmp_path: Path, capsys):
    for name in ("pretrain-1", "finetune-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage.json").write_text("{}")
    status(tmp_path / "finetune-2")
    assert capsys.readouterr().out.splitlines() == [
        f"run  {tmp_path}",
        "end  unknown: no command has ended yet",
        f"{'finetune-2':24} started, no step yet",
    ]


def test_the_closing_table_tells_images_results_and_time():
    rows = [
        {"stage": "shards", "skipped": True, "seconds": 2, "sets": {"a": {"shards": 3}}, "samples_seen": 300},
        {"stage": "finetune", "skipped": False, "seconds": 65, "metrics": {"accuracy": 0.961}, "samples_seen": 38_400},
    ]
    lines: list[str] = []
    log_table(rows, lines.append)
    assert "300" in lines[1] and "1 sets, 3 shards" in lines[1] and "2s*" in lines[1]
    assert "38,400" in lines[2] and "accuracy 96.1%" in lines[2] and "1m05s" in lines[2]


def test_status_of_no_run_names_those_that_exist(tmp_path: Path):
    (tmp_path / "digits" / "pretrain-1").mkdir(parents=True)
    (tmp_path / "digits" / "pretrain-1" / "stage.json").write_text("{}")
    with pytest.raises(UsageError, match="runs beside it: digits"):
        status(tmp_path / "digit")


def test_status_tells_a_killed_run_from_a_running_one(tmp_path: Path, capsys):
    def shown() -> tuple[str, str]:
        status(tmp_path)
        _run, end, stage = capsys.readouterr().out.splitlines()
        return end, stage

    (tmp_path / "pretrain-1").mkdir()
    (tmp_path / "pretrain-1" / "stage.json").write_text("{}")
    write_status(tmp_path, None, "running", "python -m jobs run x.yaml")
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    (tmp_path / "owner.json").write_text(json.dumps(owner))
    end, stage = shown()
    assert "running, started" in end and "started, no step yet" in stage
    (tmp_path / "owner.json").write_text(json.dumps(owner | {"pid": 2**22 + 1}))  # above Linux's largest pid
    end, stage = shown()
    assert "killed, or lost with its machine" in end and "ended before its first report" in stage
    Telemetry(tmp_path / "pretrain-1", rank=0, attempt=1).report("train", REPORT)
    _end, stage = shown()
    assert "not running, " in stage and "eta" not in stage
    write_status(tmp_path, 65, "too many bad samples", "python -m jobs run x.yaml")
    assert "not running, " in shown()[1]


def test_no_error_ends_a_command_with_success():
    assert exit_code(WorkerGroupError(0, "node", "killed by SIGKILL")) == 70, "a crash wants no code of its own"
    assert [exit_code(e) for e in (WorkerGroupError(0, "n", "", exit_code=65), OSError(), ValueError())] == [65, 74, 70]


def test_a_line_of_the_log_cannot_act_on_a_terminal(tmp_path):
    Telemetry(tmp_path, 0, 1).log("bad sample a\x1b]0;title\x07: × 3\nthe second line\u202e")
    assert (tmp_path / "log.txt").read_text() == "bad sample a\\x1b]0;title\\x07: × 3\nthe second line\\u202e\n"
