"""Keep the HTML report of a run, `<run>/report.html`, up to date: rewrite it after evaluations and at the end.

The driver writes the report, so workers never wait for it. If the report cannot be written, the failure is logged and
the run continues. PATCHLINE_REPORT=off disables the report, for example for hundreds of short runs.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from pathlib import Path

from data.checks import one_line
from jobs.extras.monitor.threaded import ThreadedWatcher
from jobs.ownership import Lease
from jobs.resolved_recipe import Campaign
from jobs.run.reading import StatusMessage
from jobs.run.watchers import Log
from jobs.terminal import program

NAME = "report.html"
SWITCH = "PATCHLINE_REPORT"
MIN_INTERVAL_S = 20.0  # minimum time between updates
SHARE = 100  # wait 100 times as long as an update takes, because the driver may share a CPU core with a worker
END_S = 20.0  # maximum wait for the last update: storage that hangs must not block the end of a command


class PageWatcher(ThreadedWatcher):
    """Rewrites the HTML report of a run when there is something new to show."""

    name = "page"

    def __init__(self) -> None:
        super().__init__()
        self.run = Path()
        self.lock = threading.Lock()  # prevents an earlier update from replacing the last one
        self.is_off = os.environ.get(SWITCH) == "off"
        self.has_ended = False
        self.next_at = 0.0
        self.shown: tuple[object, ...] = ()
        self.has_logged_failure = False

    def started(self, campaign: Campaign, lease: Lease, log: Log) -> None:
        """Start the thread that updates the report."""
        self.run = campaign.run
        if not self.is_off:
            self.start(log)

    def show(self, message: StatusMessage) -> None:
        """Update the page after a stage's first progress report, and after each new evaluation or incident."""
        evaluated = message.evaluation["step"] if message.evaluation else None
        news = (message.stage, message.report is not None, evaluated, message.incidents)
        if message.report is None or news == self.shown or time.monotonic() < self.next_at:
            return
        self.shown = news
        with self.lock:
            if not self.has_ended:
                self.write()

    def write(self) -> None:
        """Write the page; log only the first failure."""
        began = time.monotonic()
        try:
            # Imported here, because matplotlib takes half a second, which would delay the start of every run.
            from jobs.extras.report.page import write_report

            write_report([self.run], self.run / NAME, with_replay=False)
        except Exception as error:
            if not self.has_logged_failure:
                self.log(f"could not write {self.run / NAME}: {type(error).__name__}: {one_line(str(error))}")
            self.has_logged_failure = True
        took = time.monotonic() - began
        self.next_at = time.monotonic() + max(MIN_INTERVAL_S, SHARE * took)

    def ended(self) -> None:
        """Write the final version of the page, which shows how the command ended; give up after END_S seconds."""
        if self.is_off:
            return
        thread = threading.Thread(target=self.write_last, name="page", daemon=True)
        thread.start()
        thread.join(END_S)
        if thread.is_alive():
            command = f"{program()} report {shlex.quote(str(self.run))}"
            self.log(f"could not write the page within {END_S:g} s; to write it, run {command}")

    def write_last(self) -> None:
        """Write the final version of the page and log its path."""
        with self.lock:
            self.has_ended = True
            # Write no page if the run ended before its first stage.
            if any(self.run.glob("*/stage.json")):
                self.write()
                if not self.has_logged_failure:
                    self.log(f"page: {self.run / NAME}")
