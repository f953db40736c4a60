"""When a save is due, and how a step gets committed; test_stage_checkpoints.py tests how a checkpoint is written."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.training_config import SavingConfig
from tests.support.savers import FakeEngine, WorkerGroup, manifest

pytestmark = pytest.mark.quick


@pytest.fixture
def group(tmp_path: Path) -> Iterator[WorkerGroup]:
    """Yield a group of one worker after its commit of step 10."""
    made = WorkerGroup(tmp_path / "run", world=1)
    made.save(10)
    with made.collectives():
        yield made


def beginning(group: WorkerGroup, step: int, begun: list[int]) -> Callable[[], None]:
    """Return a function that begins a save of this step, and records the call."""

    def begin() -> None:
        begun.append(step)
        group.savers[0].begin(FakeEngine(0, 1, step).fragments(), manifest(step, 1, 1))

    return begin


@pytest.mark.parametrize(
    ("step", "is_evaluated", "saves_evaluated", "is_finite", "is_due"),
    [
        (8, False, False, True, True),
        (8, False, False, False, False),  # during non-finite steps
        (9, False, False, True, False),
        (9, True, False, True, False),
        (9, True, True, True, True),
        (9, True, True, False, False),
    ],
)
def test_save_is_due_at_its_interval_and_for_evaluated_steps(
    group: WorkerGroup, step: int, is_evaluated: bool, saves_evaluated: bool, is_finite: bool, is_due: bool
) -> None:
    saver = group.savers[0]
    saver.saving = SavingConfig(save_every=4)
    saver.saves_evaluated = saves_evaluated
    assert saver.is_due(step, is_evaluated=is_evaluated, is_finite=is_finite) == is_due


def test_committed_step_is_not_saved_again(group: WorkerGroup) -> None:
    begun: list[int] = []
    assert group.savers[0].ensure_committed(10, beginning(group, 10, begun))
    assert begun == []


def test_save_in_flight_is_committed_before_the_current_step(group: WorkerGroup) -> None:
    begun: list[int] = []
    beginning(group, 20, [])()
    assert group.savers[0].ensure_committed(25, beginning(group, 25, begun))
    assert begun == [25]
    assert group.checkpoints.committed_steps() == [25, 20, 10]


def test_save_in_flight_of_the_current_step_is_not_repeated(group: WorkerGroup) -> None:
    begun: list[int] = []
    beginning(group, 20, [])()
    assert group.savers[0].ensure_committed(20, beginning(group, 20, begun))
    assert begun == []


@pytest.mark.parametrize(("retries", "is_committed", "tries"), [(False, False, 0), (True, True, 2)])
def test_failed_save_is_retried_only_with_retries(
    retries: bool, is_committed: bool, tries: int, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the save in flight fail, and the first retry too."""
    storage = group.checkpoints.storage
    write = storage.write
    failures = [errno.ENOSPC, errno.ENOSPC]

    def refuse(name: str, content: memoryview) -> None:
        if failures:
            raise OSError(failures.pop(), "no room", name)
        write(name, content)

    monkeypatch.setattr(type(storage), "write", staticmethod(refuse))
    begun: list[int] = []
    beginning(group, 20, [])()
    assert group.savers[0].ensure_committed(20, beginning(group, 20, begun), retries=retries) == is_committed
    assert len(begun) == tries


def test_needed_steps_are_not_deleted(group: WorkerGroup) -> None:
    saver = group.savers[0]
    saver.saving = SavingConfig(keep=2)
    saver.needed.append(lambda: [10])
    saver.needed.append(lambda: [30])
    for step in (20, 30, 40, 50, 60):
        group.save(step)
    assert group.checkpoints.committed_steps() == [60, 50, 30, 10]
