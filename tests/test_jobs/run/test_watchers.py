"""Watchers: all receive the same calls in the same order, and none of them can end the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.errors import Preempted, RunOwned
from jobs.cluster_config import ClusterConfig
from jobs.ownership import Lease
from jobs.resolved_recipe import Campaign, Context
from jobs.run.reading import StatusMessage
from jobs.run.watchers import Watcher, Watchers
from tests.support.contexts import pretrain_context

pytestmark = pytest.mark.quick


class Recorder(Watcher):
    """Records the names of all calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def started(self, campaign: Campaign, lease: Lease, log: Any) -> None:
        self.calls.append("started")

    def stage(self, context: Context) -> None:
        self.calls.append(f"stage {context.stage.name}")

    def status(self, message: StatusMessage) -> None:
        self.calls.append(f"{message.state} attempt {message.attempt} step {message.step}")

    def ended(self) -> None:
        self.calls.append("ended")

    def close(self) -> None:
        self.calls.append("close")


class Failing(Recorder):
    """Fails in every call."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("started", "stage", "status", "ended", "close"):
            raise OSError(f"{name} is out of order")
        return super().__getattribute__(name)


def watch(watching: Watchers, context: Context) -> None:
    """Simulate a command that runs a stage with one attempt."""
    lease = Lease(context.campaign.storage, print)
    with watching.of_command(context.campaign, lease), watching.of_stage(context):
        watching.status("working", 1, 3)
    watching.close()


@pytest.fixture
def context(tmp_path: Path) -> Context:
    context = pretrain_context(tmp_path, ClusterConfig())
    context.directory.mkdir()
    return context


ALL_CALLS = [
    "started",
    "stage pretrain",
    "waiting attempt 0 step 0",
    "working attempt 1 step 3",
    "ended attempt 0 step 0",
    "ended",
    "close",
]


def test_a_watcher_receives_all_calls_in_order(context) -> None:
    recorder = Recorder()
    watch(Watchers([recorder], print), context)
    assert recorder.calls == ALL_CALLS


def test_failing_watcher_is_logged_and_does_not_affect_the_others(context) -> None:
    recorder = Recorder()
    lines: list[str] = []
    watch(Watchers([Failing(), recorder], lines.append), context)
    assert recorder.calls == ALL_CALLS
    names = ("started", "stage", "status", "ended", "close")
    assert lines == [
        f"Failing: OSError: {name} is out of order; the run continues without this output" for name in names
    ], "each error is logged once, although status is called three times"


def test_watcher_that_cannot_be_loaded_is_logged(context) -> None:
    lines: list[str] = []
    recorder = Recorder()
    watching = Watchers(["jobs.extras.nothing:Page", recorder], lines.append)
    assert watching.watchers == [recorder]
    assert len(lines) == 1
    assert lines[0].startswith("jobs.extras.nothing:Page: ModuleNotFoundError")


def test_watchers_are_loaded_by_name() -> None:
    (watcher,) = Watchers(["tests.support.watching:Silent"], print).watchers
    assert type(watcher).__name__ == "Silent"


def test_stop_request_during_a_watchers_call_is_not_lost(context) -> None:
    class Stopped(Watcher):
        def status(self, message: StatusMessage) -> None:
            raise Preempted("stopped by SIGTERM")  # as the handler of the signal does

    with pytest.raises(Preempted), Watchers([Stopped()], print).of_stage(context):
        pass


def test_a_run_that_another_command_took_over_is_not_shown_as_ended(context) -> None:
    recorder = Recorder()
    watching = Watchers([recorder], print)
    with pytest.raises(RunOwned), watching.of_command(context.campaign, Lease(context.campaign.storage, print)):
        raise RunOwned("another command owns it")
    assert recorder.calls == ["started"]


def test_a_command_that_fails_is_shown_as_ended(context) -> None:
    recorder = Recorder()
    watching = Watchers([recorder], print)
    with pytest.raises(ValueError), watching.of_command(context.campaign, Lease(context.campaign.storage, print)):
        raise ValueError
    assert recorder.calls == ["started", "ended"]


def test_a_message_has_the_newest_records_of_the_stage(context) -> None:
    messages: list[StatusMessage] = []

    class Keeping(Watcher):
        def status(self, message: StatusMessage) -> None:
            messages.append(message)

    watching = Watchers([Keeping()], print)
    with watching.of_stage(context), (context.directory / "metrics.jsonl").open("w") as file:
        for step in (1, 2):
            file.write(json.dumps({"kind": "train", "step": step}) + "\n")
            file.flush()
            watching.status("working", 1, step)
    assert [message.report and message.report["step"] for message in messages] == [None, 1, 2, 2]
