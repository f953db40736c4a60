"""Runs each part in a separate process, and writes the page and results.jsonl after every change.

1. Parts start in order, in parallel unless a part must run alone.
2. A part ends by itself, at its time limit, or when the run's budget is used up. Its processes are then killed.
3. A part is not started if less than LEAST_S of the budget remains: "no time left".
4. Every 0.2 s the runner reads the rows that parts have appended. If there are new rows, or if a part has started or
   ended, it replaces both files.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.gpu.parts import Part, Row

POLL_S = 0.2
LEAST_S = 10.0  # remaining budget that a part needs to start
END_S = 5.0  # time between SIGTERM and SIGKILL
TAIL_LINES = 200  # last lines of a part's output that log.txt contains


@dataclass
class Outcome:
    """The state of a part: its rows so far, and why it ended."""

    part: str
    section: str
    state: str = "waiting"  # waiting, running, done, failed, stopped, no time left
    seconds: float = 0.0
    reason: str = ""
    rows: list[Row] = field(default_factory=list)


@dataclass
class RunningPart:
    """A part whose process is running."""

    part: Part
    outcome: Outcome
    process: subprocess.Popen[bytes]
    began: float
    deadline: float
    rows: Path
    log: Path


class Run:
    """One run of all parts: its files, and the outcome of each part so far."""

    def __init__(
        self,
        parts: Sequence[Part],
        command_of: Callable[[Part, Path], list[str]],
        render: Callable[[list[Outcome]], str],
        *,
        page: Path,
        folder: Path,
        work: Path,
        budget_s: float,
        slots: int,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`command_of(part, rows)` returns the command of a part's process; `slots` parts run in parallel."""
        self.parts = list(parts)
        self.command_of = command_of
        self.render = render
        self.page = page
        self.folder = folder
        self.work = work
        self.deadline = time.monotonic() + budget_s
        self.slots = slots
        self.environment = {**os.environ, **(environment or {})}
        self.outcomes = [Outcome(part.name, part.section) for part in parts]
        self.running: list[RunningPart] = []
        for path in (page.parent, folder, work):
            path.mkdir(parents=True, exist_ok=True)

    def run(self) -> list[Outcome]:
        """Run all parts; at the end, for whatever reason, kill all their processes and write the page."""
        waiting = list(zip(self.parts, self.outcomes, strict=True))
        self.write()
        try:
            while waiting or self.running:
                has_changed = self._end_parts()
                while waiting and self._may_start(waiting[0][0]):
                    self._start(*waiting.pop(0))
                    has_changed = True
                for running in self.running:
                    has_changed |= self._read_rows(running)
                if has_changed:
                    self.write()
                time.sleep(POLL_S)
        finally:
            for running in self.running:
                kill(running.process)
                self._finish(running, "stopped", "the run was stopped")
            self.write()
        return self.outcomes

    def write(self) -> None:
        """Replace the page and results.jsonl atomically."""
        lines = [json.dumps(asdict(outcome)) + "\n" for outcome in self.outcomes if outcome.state != "waiting"]
        replace(self.folder / "results.jsonl", "".join(lines))
        replace(self.page, self.render(self.outcomes))

    def _may_start(self, part: Part) -> bool:
        if not self.running:
            return True
        if part.is_alone or self.running[0].part.is_alone:
            return False
        return len(self.running) < self.slots

    def _start(self, part: Part, outcome: Outcome) -> None:
        now = time.monotonic()
        if self.deadline - now < LEAST_S:
            outcome.state = "no time left"
            return
        name = part.name.replace("/", "").replace(",", "").replace(" ", "-")
        rows = self.work / f"{name}.rows"
        rows.unlink(missing_ok=True)
        log = self.work / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command_of(part, rows),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        outcome.state = "running"
        print(f"{part.name}: started", flush=True)
        deadline = min(now + part.limit_s, self.deadline)
        self.running.append(RunningPart(part, outcome, process, now, deadline, rows, log))

    def _end_parts(self) -> bool:
        """Finish the parts that have ended or reached their time limit; return whether there were any."""
        ended = []
        for running in self.running:
            code = running.process.poll()
            if code is not None:
                ended.append(running)
                if code == 0:
                    self._finish(running, "done")
                else:
                    self._finish(running, "failed", f"exit code {code}: {last_line(running.log)}")
            elif time.monotonic() > running.deadline:
                ended.append(running)
                kill(running.process)
                self._finish(running, "stopped", f"time limit of {running.deadline - running.began:.0f} s")
        self.running = [running for running in self.running if running not in ended]
        return bool(ended)

    def _finish(self, running: RunningPart, state: str, reason: str = "") -> None:
        self._read_rows(running)
        outcome = running.outcome
        outcome.state = state
        outcome.reason = reason
        outcome.seconds = round(time.monotonic() - running.began, 1)
        print(f"{outcome.part}: {state} after {outcome.seconds:.0f} s  {reason}", flush=True)
        tail = running.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"=== {outcome.part}: {state} after {outcome.seconds:.0f} s {reason}\n")
            log.writelines(f"{line}\n" for line in tail)

    def _read_rows(self, running: RunningPart) -> bool:
        """Read a part's rows; return whether there are new ones. A line without a line break is incomplete."""
        if not running.rows.exists():
            return False
        lines = running.rows.read_text().split("\n")[:-1]
        if len(lines) == len(running.outcome.rows):
            return False
        running.outcome.rows = [json.loads(line) for line in lines]
        return True


def replace(path: Path, text: str) -> None:
    """Replace the text of a file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    os.replace(temporary, path)


def last_line(log: Path) -> str:
    """Return the last non-blank line of a part's output."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and all its child processes: SIGTERM first, so that it can clean up, then SIGKILL."""
    members = []
    with suppress(psutil.Error):
        members = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in members:
        with suppress(psutil.Error):
            member.kill()
    process.wait()
