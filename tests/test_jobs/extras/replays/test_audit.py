"""The stretches that an audit repeats, and the cause that it derives from the first difference."""

from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import UsageError
from jobs.extras.replays import audit
from jobs.extras.replays.audit import OTHER_HARDWARE, Finding, choose_stretches, classify, compare
from pipeline.extras.replays.batch import RecordedStep

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (Finding(10, 15, what="ledger", step=11, size=1e-6, conditions={"threads": [1, 2]}), "other data"),
        (Finding(10, 15, what="loss", step=11, size=1e-6, conditions={"threads": [1, 2]}), OTHER_HARDWARE),
        (Finding(10, 15, what="loss", step=11, size=1e-2, conditions={"threads": [1, 2]}), "silent corruption"),
        # The first loss can be equal by chance, and a moment can differ before any loss.
        (Finding(10, 15, what="loss", step=12, size=1e-6, conditions={"threads": [1, 2]}), OTHER_HARDWARE),
        (Finding(10, 15, what="state", step=15, conditions={"arithmetic": [{}, {"MKL_CBWR": "SSE2"}]}), OTHER_HARDWARE),
        (Finding(10, 15, what="state", step=15), "silent corruption"),
        (Finding(10, 15, what="loss", step=11, size=1e-6), "silent corruption"),
    ],
)
def test_the_cause_follows_from_the_first_difference_and_the_conditions(finding: Finding, verdict: str) -> None:
    assert classify(finding) == verdict


@pytest.mark.parametrize(("share", "stretches"), [(0.01, 1), (0.1, 1), (0.25, 2), (0.5, 5), (1.0, 10)])
def test_an_audit_repeats_as_many_stretches_as_its_share_has_steps_for(share: float, stretches: int) -> None:
    """A stage of 100 steps with a commit every 10 steps; at least one stretch is repeated."""
    stage: Any = SimpleNamespace(bounds=range(0, 101, 10), steps=100, folder=SimpleNamespace(name="pretrain"))
    for seed in range(3):
        chosen = choose_stretches(stage, share, seed)
        starts = [finding.start for finding in chosen]
        assert len(set(starts)) == stretches
        assert starts == sorted(starts)
        assert [finding.last - finding.start for finding in chosen] == [10] * stretches


@pytest.mark.parametrize(("share", "message"), [(0.0, "--share is 0.0"), (1.5, "--share is 1.5"), (0.1, "no commits")])
def test_an_impossible_share_or_a_stage_without_commits_is_refused(share: float, message: str) -> None:
    stage: Any = SimpleNamespace(bounds=[0], steps=100, folder=SimpleNamespace(name="pretrain"))
    with pytest.raises(UsageError, match=message):
        choose_stretches(stage, share, seed=0)


@pytest.mark.parametrize(
    ("exact_parts", "conditions"), [(0, {"world": [2, 1], "threads": [4, 1]}), (2, {"threads": [4, 1]})]
)
def test_conditions_of_all_attempts_of_a_stretch_count(
    exact_parts: int, conditions: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers trained steps 1 to 3, and one worker 4 to 6; the commits between them no longer exist."""
    before = stage_of((1, 2, 4, 0), (2, 1, 1, 3), exact_parts=exact_parts)
    after = stage_of((1, 1, 1, 0), exact_parts=exact_parts)
    for step in range(1, 7):
        loss = 2.0 + 1e-7 * step  # rounding, in the steps that two workers have trained
        before.step_records[step] = RecordedStep(1 if step < 4 else 2, 2 if step < 4 else 1, loss, 1.0, ())
        after.step_records[step] = RecordedStep(1, 1, 2.0, 1.0, ())
    manifest = SimpleNamespace(files={}, ledger="a")
    monkeypatch.setattr(audit, "read_manifest", lambda folder: manifest)
    monkeypatch.setattr(audit, "Reader", lambda folder, files: SimpleNamespace(pieces={}))
    finding = Finding(0, 6)
    compare(before, after, finding)
    assert (finding.step, finding.what) == (1, "loss")
    assert finding.conditions == conditions
    assert classify(finding) == OTHER_HARDWARE


def stage_of(*attempts: tuple[int, int, int, int], exact_parts: int) -> Any:
    """Return a stage with a commit of step 6, from the number, workers, threads and first step of its attempts."""
    starts = []
    for attempt, world, threads, step in attempts:
        record = {"attempt": attempt, "step": step, "world": world, "threads": threads, "arithmetic": {}}
        starts.append({**record, "hardware": "cpu", "versions": {}, "code": "c"})
    cfg = SimpleNamespace(exact_parts=exact_parts)
    return SimpleNamespace(
        cfg=cfg, commits={6: "step-6"}, starts=starts, step_records={}, start_of=lambda step: starts[-1]
    )
