"""The page that a run keeps of itself, `<run>/report.html`: renewed at each evaluation, and when the command ends.

    with kept_page(run, log) as page:
        page.show(view)        # from a thread of the driver, every few seconds (jobs/extras/monitor/status_poller.py)

It is made by the driver, never by a worker: training does not wait for it. A page that cannot be made costs the run a
line. PATCHLINE_REPORT=off keeps none, for example where hundreds of short runs are started.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data.checks import one_line
from data.errors import RunOwned
from jobs.extras.monitor.status_poller import View

NAME = "report.html"
SWITCH = "PATCHLINE_REPORT"
LEAST_S = 20.0  # between two renewals
SHARE = 100  # a page that took a second is not made again for so many seconds: the driver may share a worker's core
END_S = 20.0  # for the last page; a storage that hangs must not hold up the end of a command


class KeptPage:
    """Writes a run's page where there is something new to see."""

    def __init__(self, run: Path, log: Callable[[str], None]) -> None:
        self.run = run
        self.log = log
        self.lock = threading.Lock()  # the last page is not overtaken by one that began before it
        self.has_ended = False
        self.next_at = 0.0
        self.shown: tuple[object, ...] = ()
        self.has_complained = False

    def show(self, view: View) -> None:
        """Renew the page where there is a first report, another evaluation or another incident of the stage."""
        evaluated = view.evaluation["step"] if view.evaluation else None
        news = (view.stage, view.report is not None, evaluated, view.incidents)
        if view.report is None or news == self.shown or time.monotonic() < self.next_at:
            return
        self.shown = news
        with self.lock:
            if not self.has_ended:
                self.write()

    def write(self) -> None:
        """Write the page, or a line about why there is none."""
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

    def end(self) -> None:
        """Write the last page, which tells how the command has ended."""
        with self.lock:
            self.has_ended = True
            # A run that was refused before its first stage has nothing to show.
            if any(self.run.glob("*/stage.json")):
                self.write()
                if not self.has_complained:
                    self.log(f"page: {self.run / NAME}")


@contextmanager
def kept_page(run: Path, log: Callable[[str], None]) -> Iterator[KeptPage | None]:
    """Keep the page of a run as long as the block works, and write the last one behind it; None where none is wanted.

    The block is the command's life up to its entry in status.json, which the last page shows.
    """
    if os.environ.get(SWITCH) == "off":
        yield None
        return
    page = KeptPage(run, log)
    is_ours = True
    try:
        yield page
    except RunOwned:
        is_ours = False  # any more: the page is that of the command that has taken the run over
        raise
    finally:
        last = threading.Thread(target=page.end, name="page", daemon=True)
        if is_ours:
            last.start()
            last.join(END_S)
