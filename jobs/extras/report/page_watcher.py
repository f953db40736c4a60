"""The page that a run keeps, `<run>/report.html`: renewed at each evaluation, and when the command ends.

The driver writes it, never a worker: training does not wait for it. A page that cannot be written costs the run a line.
PATCHLINE_REPORT=off keeps none, for example if hundreds of short runs are started.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from data.checks import one_line
from jobs.extras.monitor.threaded import ThreadedWatcher
from jobs.ownership import Lease
from jobs.resolved_recipe import Campaign
from jobs.run.reading import StatusMessage
from jobs.run.watchers import Log

NAME = "report.html"
SWITCH = "PATCHLINE_REPORT"
LEAST_S = 20.0  # between two renewals
SHARE = 100  # a page that took a second to write is kept for so many seconds: the driver may share a worker's core
END_S = 20.0  # for the last page; a storage that hangs must not hold up the end of a command


class PageWatcher(ThreadedWatcher):
    """Writes the page of a run when there is something new to see."""

    name = "page"

    def __init__(self) -> None:
        super().__init__()
        self.run = Path()
        self.lock = threading.Lock()  # so that a page that began earlier does not replace the last one
        self.is_off = os.environ.get(SWITCH) == "off"
        self.has_ended = False
        self.next_at = 0.0
        self.shown: tuple[object, ...] = ()
        self.has_complained = False

    def started(self, campaign: Campaign, lease: Lease, log: Log) -> None:
        """Start the thread that renews the page."""
        self.run = campaign.run
        if not self.is_off:
            self.start(log)

    def show(self, message: StatusMessage) -> None:
        """Renew the page at the first report, and at another evaluation or incident of the stage."""
        evaluated = message.evaluation["step"] if message.evaluation else None
        news = (message.stage, message.report is not None, evaluated, message.incidents)
        if message.report is None or news == self.shown or time.monotonic() < self.next_at:
            return
        self.shown = news
        with self.lock:
            if not self.has_ended:
                self.write()

    def write(self) -> None:
        """Write the page, or log once why that failed."""
        began = time.monotonic()
        try:
            from jobs.extras.report.page import write_report  # matplotlib takes half a second: no start waits for it

            write_report([self.run], self.run / NAME, with_replay=False)
        except Exception as error:
            if not self.has_complained:
                self.log(f"no page of this run: {type(error).__name__}: {one_line(str(error))}")
            self.has_complained = True
        took = time.monotonic() - began
        self.next_at = time.monotonic() + max(LEAST_S, SHARE * took)

    def ended(self) -> None:
        """Write the last page, which shows how the command ended."""
        if self.is_off:
            return
        thread = threading.Thread(target=self.write_last, name="page", daemon=True)
        thread.start()
        thread.join(END_S)

    def write_last(self) -> None:
        """Write the last page and log where it is."""
        with self.lock:
            self.has_ended = True
            # A run that was refused before its first stage has nothing to show.
            if any(self.run.glob("*/stage.json")):
                self.write()
                if not self.has_complained:
                    self.log(f"page: {self.run / NAME}")
