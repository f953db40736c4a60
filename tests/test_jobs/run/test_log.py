"""The driver's log: lines of the stage and of the driver, each shown once, even if a terminal is stuck."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import terminal
from jobs.run.log import RunLog
from jobs.run.reading import StageReader, StatusMessage
from pipeline.monitoring.telemetry import Telemetry
from tests.test_pipeline.monitoring.test_telemetry import REPORT

pytestmark = pytest.mark.quick


def message(attempt: Path, step: int = 0) -> StatusMessage:
    """Return the status of a stage whose workers have reported a step in this attempt."""
    return StageReader(attempt.parents[1]).read("working", int(attempt.name.rpartition("-")[2]), step)


def test_driver_shows_every_complete_line_once(tmp_path: Path, capsys):
    attempt = tmp_path / "pretrain-1" / "attempts" / "attempt-000001"
    attempt.mkdir(parents=True)
    log = tmp_path / "pretrain-1" / "log.txt"
    run_log = RunLog()
    log.write_text("one\ntwo\nthr")
    run_log.status(message(attempt))
    log.write_text("one\ntwo\nthree\n")
    run_log.status(message(attempt))
    assert capsys.readouterr().out == "[pretrain-1] one\n[pretrain-1] two\n[pretrain-1] three\n"


def test_drivers_lines_are_in_the_stages_log_and_are_shown_once(tmp_path: Path, capsys):
    attempt = tmp_path / "pretrain-1" / "attempts" / "attempt-000003"
    attempt.mkdir(parents=True)
    log = tmp_path / "pretrain-1" / "log.txt"
    run_log = RunLog()
    run_log("pretrain: skipped")
    run_log.stage_file = log
    Telemetry(tmp_path / "pretrain-1", rank=1, attempt=3).log("bad sample 1 replaced")
    run_log("SIGTERM: finishing the step\n  Ctrl-C again ends at once")
    run_log.status(message(attempt))
    assert log.read_text() == (
        "[worker 1] bad sample 1 replaced\n[driver] SIGTERM: finishing the step\n[driver]   Ctrl-C again ends at once\n"
    )
    assert capsys.readouterr().out == (
        "pretrain: skipped\nSIGTERM: finishing the step\n  Ctrl-C again ends at once\n"
        "[pretrain-1] [worker 1] bad sample 1 replaced\n"
    )


def test_wait_is_logged_once_with_its_limit(tmp_path: Path, capsys):
    attempt = tmp_path / "pretrain-1" / "attempts" / "attempt-000003"
    attempt.mkdir(parents=True)
    run_log = RunLog(start_timeout_s=300.0)
    run_log.stage_file = tmp_path / "pretrain-1" / "log.txt"

    def looks(count: int) -> list[str]:
        for _ in range(count):
            run_log.last_line_at -= 11.0  # as if the last line were 11 s old
            run_log.status(replace(message(attempt), stage="pretrain"))
        return capsys.readouterr().out.splitlines()

    waiting = "[pretrain] waiting for the workers to start, up to 5m00s (cluster.start_timeout_s)"
    assert looks(5) == [waiting]
    (attempt / "rank-00000.json").write_text("{}")
    assert looks(5) == ["[pretrain] 1 workers have started; waiting for their first step"]
    Telemetry(tmp_path / "pretrain-1", rank=0, attempt=3).report("train", REPORT)
    assert looks(3) == [], "no line is repeated, because the bar shows progress"
    assert run_log.stage_file.read_text().splitlines() == [
        f"[driver] {waiting}",
        "[driver] [pretrain] 1 workers have started; waiting for their first step",
    ]


def on_a_terminal(work: Callable[[terminal.Terminal], None]) -> str:
    """Return the output to a terminal with 120 columns during the work."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    pieces: list[bytes] = []
    is_finished = threading.Event()

    def read_all() -> None:
        while True:
            was_finished = is_finished.is_set()
            if select.select([reader], [], [], 0.05)[0]:
                pieces.append(os.read(reader, 4096))
            elif was_finished:
                return

    # Read during the work, because a full terminal blocks the writer.
    reading = threading.Thread(target=read_all)
    reading.start()
    with open(writer, "w") as stream:
        shown = terminal.Terminal(stream)
        work(shown)
        while not shown.waiting.empty() or shown.is_move_waiting:
            time.sleep(0.01)
        time.sleep(0.3)  # rich draws ten times a second
        assert shown.close() == 0
        is_finished.set()
        reading.join()
    os.close(reader)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(pieces).decode())


def test_bar_moves_while_lines_are_queued_and_lines_fit_100_columns():
    def lines_and_moves(shown: terminal.Terminal) -> None:
        for step in range(1, 151):
            shown.write(f"[pretrain] step {step}/150")
            shown.move_bar(step, 150, f"pretrain  loss {1 / step:.4f}")
        shown.write("  [pretrain] " + "images " * 30)

    written = on_a_terminal(lines_and_moves)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", written)]
    assert [line for line in lines if line.startswith("[pretrain]")] == [
        f"[pretrain] step {step}/150" for step in range(1, 151)
    ]
    assert "pretrain  loss 0.0067" in written, "the bar's last state"
    assert "150/150 eta" in written, "the bar's last state"
    words = [line for line in lines if "images" in line]
    assert len(words) > 1, "continued lines are indented"
    assert max(map(len, words)) <= 100, "continued lines are indented"
    assert words[0].startswith("  [pretrain] images")
    assert words[1].startswith("      images")


def test_bar_moves_with_the_workers_steps_between_two_reports(tmp_path: Path, monkeypatch):
    attempt = tmp_path / "pretrain-1a2b3c4d" / "attempts" / "attempt-000003"
    attempt.mkdir(parents=True)
    Telemetry(tmp_path / "pretrain-1a2b3c4d", rank=0, attempt=3).report("train", {**REPORT, "step": 50, "steps": 1100})
    run_log = RunLog(quiet=True)
    moves: list[tuple[int, int | None]] = []
    monkeypatch.setattr(run_log, "show_progress", lambda done, total, text: moves.append((done, total)))
    for step in (0, 49, 53, 61):
        run_log.status(message(attempt, step))
    run_log.status(message(attempt.with_name("attempt-000004")))  # its workers have not started
    assert moves == [(50, 1100), (50, 1100), (53, 1100), (61, 1100), (0, None)]


def test_terminal_shows_the_stages_name_and_the_log_its_key(tmp_path: Path, capsys):
    attempt = tmp_path / "pre-train-1a2b3c4d" / "attempts" / "attempt-000001"
    attempt.mkdir(parents=True)
    run_log = RunLog(file=tmp_path / "log.txt")
    (tmp_path / "pre-train-1a2b3c4d" / "log.txt").write_text("one\n")
    run_log.status(message(attempt))
    assert capsys.readouterr().out == "[pre-train] one\n"
    assert (tmp_path / "log.txt").read_text() == "[pre-train-1a2b3c4d] one\n"


def test_lines_missed_by_a_stuck_terminal_are_counted_and_reported(monkeypatch):
    monkeypatch.setattr(terminal, "CLOSE_S", 0.2)
    monkeypatch.setattr(terminal, "MAX_QUEUED", 10)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4095 + b"\n")
    with open(writer, "w") as stream:
        stuck = terminal.Terminal(stream)
        stuck.write("line 0")
        while not stuck.waiting.empty():  # the thread has taken the line, and cannot write it
            time.sleep(0.01)
        for number in range(1, 31):
            stuck.write(f"line {number}")
        assert stuck.close() == 31
        # Somebody scrolls, and the queued lines are written.
        os.read(reader, 4096)
        stuck.thread.join(60)
        shown = os.read(reader, 4096).decode().splitlines()
    os.close(reader)
    notice = "(20 lines are not shown, because this terminal was blocked; they are in log.txt)"
    assert shown == ["line 0", notice, *(f"line {number}" for number in range(1, 11))]
