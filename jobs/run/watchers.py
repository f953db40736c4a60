"""Observe a run with watchers, which update the terminal, the HTML report, gauges, trackers and so on.

    class Killer(Watcher):
        def status(self, message: StatusMessage) -> None:
            if message.report is not None and message.report["step"] > 40: ...

    run_campaign(campaign, watchers=[Killer(), "jobs.extras.report.page_watcher:PageWatcher"])

Each command calls, in this order:
1. `started`, after the command has acquired the run's lease;
2. for each stage, unless it is skipped: `stage`, then `status` about twice a second while its workers run. The
   first message of a stage has the state "waiting", and the last message the state "ended";
3. `finished`, if all stages have finished;
4. `ended`, after status.json was written. It is not called if another command has taken over the run;
5. `close`, after the run's lease was released.

An exception in a watcher is logged once, and the run continues.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from typing import Any

from data.checks import one_line
from data.errors import Preempted, RunOwned
from jobs.ownership import Lease
from jobs.resolved_recipe import Campaign, Context
from jobs.run.reading import StageReader, StageState, StatusMessage

Log = Callable[[str], None]


class Watcher:
    """Base class for watchers; its methods do nothing."""

    def started(self, campaign: Campaign, lease: Lease, log: Log) -> None:
        """Prepare to watch a run; called after the command has acquired the run's lease."""

    def stage(self, context: Context) -> None:
        """Prepare to watch a stage that is about to start."""

    def status(self, message: StatusMessage) -> None:
        """Show the stage's status. The driver's loop calls this method, so it must return at once."""

    def finished(self, campaign: Campaign, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the results of all stages, one row each, as `run_campaign` returns them; the table has been logged."""

    def ended(self) -> None:
        """Show how the command ended; the command still holds the run's lease."""

    def close(self) -> None:
        """Release the watcher's resources."""


class Watchers:
    """The watchers of one command; forwards each call to all of them."""

    def __init__(self, watchers: Sequence[Watcher | str], log: Log) -> None:
        self.log = log
        self.logged_failures: set[str] = set()  # exceptions already logged
        self.reader: StageReader | None = None  # reader of the running stage
        self.watchers: list[Watcher] = []
        for watcher in watchers:
            with self.failures_logged(str(watcher)):
                self.watchers.append(resolve_name(watcher)() if isinstance(watcher, str) else watcher)

    @contextmanager
    def of_command(self, campaign: Campaign, lease: Lease) -> Iterator[None]:
        """Watch the command that runs in the block; call `ended` once status.json records the command's result."""
        for watcher in self.watchers:
            with self.failures_logged(watcher):
                watcher.started(campaign, lease, self.log)
        is_owner = True
        try:
            yield
        except RunOwned:
            is_owner = False
            raise
        finally:
            for watcher in self.watchers:
                if is_owner:
                    with self.failures_logged(watcher):
                        watcher.ended()

    @contextmanager
    def of_stage(self, context: Context) -> Iterator[None]:
        """Watch the stage that runs in the block."""
        self.reader = StageReader(context.directory)
        for watcher in self.watchers:
            with self.failures_logged(watcher):
                watcher.stage(context)
        self.status("waiting")
        try:
            yield
        finally:
            self.status("ended")

    def status(self, state: StageState, attempt: int = 0, step: int = 0) -> None:
        """Read the stage's status and send it to every watcher."""
        # A shared folder may have a stale file handle: skip this message, the next one reads again.
        with suppress(OSError):
            assert self.reader is not None
            message = self.reader.read(state, attempt, step)
            for watcher in self.watchers:
                with self.failures_logged(watcher):
                    watcher.status(message)

    def finished(self, campaign: Campaign, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send the results of all stages to every watcher."""
        for watcher in self.watchers:
            with self.failures_logged(watcher):
                watcher.finished(campaign, rows)

    def close(self) -> None:
        """Close the watchers in reverse order, the terminal last, because the other watchers print to it."""
        for watcher in reversed(self.watchers):
            with self.failures_logged(watcher):
                watcher.close()

    @contextmanager
    def failures_logged(self, watcher: Watcher | str) -> Iterator[None]:
        """Log each distinct exception raised by a watcher once, and continue."""
        name = watcher if isinstance(watcher, str) else type(watcher).__name__
        try:
            yield
        except (Preempted, RunOwned):  # raised by a signal handler during the call (jobs/run/session.py)
            raise
        except Exception as error:
            failure = f"{name}: {type(error).__name__}: {one_line(str(error))}"
            if failure not in self.logged_failures:
                self.logged_failures.add(failure)
                self.log(f"{failure}; the run continues without this output")
