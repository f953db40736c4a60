"""Evaluation during training: it has the values of the training loop, does not affect training, and logs failures."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.index.document import load_index
from data.order import Ledger
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import WorkerGroup
from jobs.cluster_config import ClusterConfig
from jobs.extras.async_evaluation.spare_worker import SEARCH, NoPlace, SpareWorker
from jobs.extras.checkpoints import stored
from pipeline.artifacts import EVALUATIONS, requested_steps
from pipeline.checkpoints.manifest import committed, step_of
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints, checkpoints_in
from pipeline.extras import async_evaluation
from pipeline.extras.replays.spikes import HealthConfig, SpikeSearch
from pipeline.health import Health
from pipeline.monitoring.telemetry import Telemetry, read_metrics
from pipeline.worker import Progress
from tests.support import worker_functions
from tests.support.configs import FullConfig
from tests.support.demo import step_losses
from tests.support.drives import assert_same, finish, output_of, stage, start

EVERY_16 = ("pretrain.evaluate_every=16", "pretrain.keep_every=16")  # steps at which nothing else is saved
SPARE = "pretrain.evaluate_on=spare"


def evaluated(run: Path) -> dict[int, dict[str, float]]:
    """Return the values of every evaluation by step, without the place and duration."""
    values = {}
    for record in read_metrics(stage(run), "evaluate"):
        named = {"kind", "time", "attempt", "step", "where", "node", "seconds"}
        assert record["step"] not in values, "reported twice"
        values[record["step"]] = {name: value for name, value in record.items() if name not in named}
    return values


def where(run: Path) -> dict[int, str]:
    return {record["step"]: record["where"] for record in read_metrics(stage(run), "evaluate")}


@pytest.fixture(scope="module")
def sets(shards, tmp_path_factory) -> tuple[str, ...]:
    """Evaluate accuracy and few-shot features on the test set: 2 workers have 45 batches of 4 each."""
    path = shards / "test"
    # A training set of the same size; the same folder for training and test would be refused.
    learned = tmp_path_factory.mktemp("learned")
    pack(digits(train=False, image_size=16), learned, name="learned", shard_samples=90)
    return (f"pretrain.data.evaluate={path}", f"pretrain.probe={{train: {learned}, test: {path}, shots: [1, 5]}}")


@pytest.fixture(scope="module")
def loop(tmp_path_factory, sets) -> Path:
    """A run whose training workers evaluate steps 16, 32 and 40."""
    run = tmp_path_factory.mktemp("loop") / "run"
    assert finish(run, *EVERY_16, *sets) == 0, output_of(run)
    return run


@pytest.fixture
def run(loop, tmp_path) -> Path:
    """A run whose shards are packed, before training."""
    shutil.copytree(loop, tmp_path / "run", ignore=shutil.ignore_patterns("pretrain-*", "attempts", "status.json"))
    return tmp_path / "run"


# ------------------------------------------------------------------------ whole runs


def test_evaluation_during_training_has_the_values_of_the_training_loop(loop, run, sets, shards) -> None:
    assert finish(run, *EVERY_16, *sets, SPARE, patch="spare_core") == 0, output_of(run)
    assert_same(run, loop)
    assert evaluated(run) == evaluated(loop)
    assert evaluated(run).keys() == {16, 32, 40}
    assert evaluated(run)[16]["judged"] == load_index(shards / "test").samples
    assert where(run) == {16: "spare", 32: "spare", 40: "training"}
    assert where(loop) == dict.fromkeys((16, 32, 40), "training")
    log = (stage(run) / "log.txt").read_text()
    assert log.count("evaluate step 16  accuracy 0.") == log.count("evaluate step 32  accuracy 0.") == 1
    assert "during training, on " in log
    assert "evaluation during training: " not in log
    assert (stage(loop) / "log.txt").read_text().count("evaluation during training: ") == 1, "its cost is logged once"
    kept = {folder: {step_of(path) for path in committed(stage(folder) / "checkpoints")} for folder in (run, loop)}
    assert kept[run] >= {16, 32}, "a spare worker needs a commit"
    assert kept[loop] == {30, 35, 40}, "the training workers need no commit"


@pytest.mark.slow
@pytest.mark.parametrize("options", [("precision=bf16", "zero=3"), ("polyak=0.9", "zero=1"), ("exact_parts=4",)])
def test_the_values_equal_those_of_the_loop_with_other_settings(options, run, sets) -> None:
    settings = [f"pretrain.{option}" for option in options]
    assert finish(run, *EVERY_16, *sets, *settings) == 0, output_of(run)
    expected = evaluated(run)
    shutil.rmtree(stage(run))
    assert finish(run, *EVERY_16, *sets, *settings, SPARE, patch="spare_core") == 0, output_of(run)
    assert where(run)[16] == "spare"
    assert evaluated(run) == expected


@pytest.mark.slow
def test_without_a_spare_core_the_loop_evaluates_and_logs_the_cost(loop, run, sets) -> None:
    assert finish(run, *EVERY_16, *sets, SPARE, "cluster.cpus_per_worker=1") == 0, output_of(run)
    assert_same(run, loop)
    assert evaluated(run) == evaluated(loop)
    assert set(where(run).values()) == {"training"}
    log = (stage(run) / "log.txt").read_text()
    assert log.count("% of the time; evaluate_on=spare, but nothing was spare") == 1
    assert not requested_steps(stage(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause"), [("SIGKILL", "killed by SIGKILL"), ("SIGSTOP", "frozen: stopped by a signal")]
)
def test_an_evaluator_that_dies_or_hangs_does_not_affect_training(how, cause, loop, run, sets) -> None:
    stall = "pretrain.stall_s=6"
    assert finish(run, *EVERY_16, *sets, SPARE, stall, patch=f"evaluator_dies {how}") == 0, output_of(run)
    assert_same(run, loop)
    assert evaluated(run) == evaluated(loop)
    assert where(run)[16] == "spare"
    assert f"evaluate step 16: the spare worker failed ({cause}" in output_of(run), output_of(run)
    assert "attempt 1 of 3" in output_of(run)
    assert "restarting" not in output_of(run)
    assert len(list(run.parent.glob("struck-*"))) == 1
    assert not (stage(run) / "incidents.txt").exists()


@pytest.mark.slow
def test_an_evaluator_that_always_dies_is_given_up_with_a_message(loop, run, sets) -> None:
    assert finish(run, *EVERY_16, *sets, SPARE, patch="evaluator_dies SIGKILL 99") == 0, output_of(run)
    assert_same(run, loop)
    assert evaluated(run)[40] == evaluated(loop)[40]
    failed = {record["step"] for record in read_metrics(stage(run), "evaluate_failed")}
    assert 16 in failed
    assert failed | evaluated(run).keys() == {16, 32, 40}
    assert "evaluate step 16 FAILED on a spare worker (killed by SIGKILL)" in output_of(run), output_of(run)


def wait_for(claim: Callable[[], object], process: Any) -> None:
    deadline = time.monotonic() + 120
    while not claim():
        assert process.is_alive(), "the condition was not met in time"
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
def test_the_next_command_finishes_pending_evaluations(number, exit_code, loop, run, sets) -> None:
    """The driver is killed, or asked to stop, after training while evaluations are pending."""
    process = start(run, *EVERY_16, *sets, SPARE, patch="slow_evaluator")
    wait_for(lambda: "for the evaluation of steps 16, 32" in output_of(run), process)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == exit_code, output_of(run)
    assert requested_steps(stage(run)) == [16, 32]
    assert evaluated(run).keys() == {40}
    assert exit_code != 75 or "but the evaluation of steps 16, 32 has not; run the same command again" in output_of(run)
    (run.parent / "go").touch()
    assert finish(run, *EVERY_16, *sets, SPARE, patch="slow_evaluator") == 0, output_of(run)
    assert_same(run, loop)
    values = {record["step"]: record["accuracy"] for record in read_metrics(stage(run), "evaluate")}
    assert values == {step: row["accuracy"] for step, row in evaluated(loop).items()}
    assert step_losses(stage(run)) == step_losses(stage(loop)), "no step was computed twice"


# ------------------------------------------------------------------------ one driver, no training


class Scripted:
    """Resources on which evaluations have scripted outcomes: a value to return, or an error to raise."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.evaluated: list[int] = []
        self.searched: list[tuple[int, Any]] = []  # step and masked samples of each search
        self.has_room = True
        self.has_training_ended = False

    def is_free(self) -> bool:
        return self.has_room or self.has_training_ended

    def is_needed_elsewhere(self) -> bool:
        return False

    def take(self) -> bool:
        return True

    def release_borrowed(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, function: Any, task: dict[str, Any], folder: Path, on_tick: Callable[[], None]) -> Any:
        on_tick()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if "search" in task:
            self.searched.append((task["search"]["step"], task["hooks"][SEARCH]["masked"]))
        else:
            self.evaluated.append(step_of(Path(task["checkpoint"])))
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            return outcome
        return {"values": {"accuracy": 0.5, "judged": 4}, "node": "n1", "seconds": 1.5, "remarks": []}


class ScriptedGroup:
    """A worker group of one on scripted resources."""

    def __init__(self, place: Scripted, cluster: ClusterConfig, folder: Path) -> None:
        self.place = place

    def phases(self) -> dict[int, Any]:
        return {}

    def is_frozen(self, rank: int) -> bool:
        return False

    def run(self, function: Any, task: dict[str, Any], on_tick: Callable[[], None]) -> Any:
        return self.place.run(function, task, Path(), on_tick)


@pytest.fixture(autouse=True)
def scripted_groups(monkeypatch) -> None:
    def group_on(place: Any, cluster: ClusterConfig, folder: Path) -> Any:
        kind = ScriptedGroup if isinstance(place, Scripted) else WorkerGroup
        return kind(place, cluster, folder)

    monkeypatch.setattr("jobs.extras.async_evaluation.spare_worker.WorkerGroup", group_on)


class Stage:
    """A stage's folder with commits, and the spare worker that evaluates them."""

    def __init__(self, folder: Path, places: Scripted) -> None:
        self.folder = folder
        self.log_lines: list[str] = []
        no = lambda *args: None  # noqa: E731
        context: Any = SimpleNamespace(directory=folder, log=self.log_lines.append, poll=no, stop_requested=no)
        context.checkpoints = checkpoints_in(folder / "checkpoints")
        self.attempt = folder / "attempts" / "attempt-000001"
        self.attempt.mkdir(parents=True)
        self.evaluations = SpareWorker(FullConfig(steps=100, evaluate_every=10, evaluate_on="spare"), context)
        self.evaluations.place = places  # type: ignore[assignment]
        self.places = places
        # Set by `during_attempt`; here for tests that call methods directly, without a thread.
        self.evaluations.task = {}
        self.evaluations.attempt_folder = self.attempt
        self.evaluations.cluster = ClusterConfig(backend="processes")

    def during_attempt(self) -> AbstractContextManager[None]:
        """Evaluate during an attempt, as the supervisor does."""
        return self.evaluations.during_attempt({}, self.attempt, ClusterConfig(backend="processes"))

    def commit(self, *steps: int) -> None:
        for step in steps:
            (self.folder / "checkpoints" / f"step-{step:010d}").mkdir(parents=True)
            async_evaluation.request(self.folder, step)

    def answers(self) -> dict[int, str]:
        kinds = {}

        def report(kind: str, values: Any, line: str) -> bool:
            kinds[values["step"]] = kind
            return True

        async_evaluation.report_records(self.folder, report)
        return kinds


def test_only_the_two_newest_waiting_commits_are_evaluated_and_the_others_are_skipped(tmp_path) -> None:
    made = Stage(tmp_path, Scripted())
    made.places.has_room = False
    made.commit(10, 20, 30)
    made.evaluations.poll()
    assert made.places.evaluated == []
    assert requested_steps(tmp_path) == [20, 30]
    assert not (made.attempt / async_evaluation.SPARE_FILE).exists(), "the loop must evaluate the next step itself"
    made.places.has_room = True
    for _ in range(3):
        made.evaluations.poll()
    made.commit(40, 50, 60)
    for _ in range(3):
        made.evaluations.poll()
    assert made.places.evaluated == [20, 30, 50, 60]
    assert (made.attempt / async_evaluation.SPARE_FILE).exists()
    expected = {step: "evaluate" for step in (20, 30, 50, 60)}
    assert made.answers() == {**expected, 10: "evaluate_skipped", 40: "evaluate_skipped"}
    assert not made.answers()
    assert not requested_steps(tmp_path)


def test_spikes_are_searched_in_order_and_the_samples_found_are_masked_once(tmp_path, monkeypatch) -> None:
    """The second search fails, the third is postponed once, the fourth comes too late; training always continues."""
    sample = {"slot": 5, "shard": "a.tar", "sample": 7, "key": "k7", "range": [0, 7, 8], "is_twin": False}
    named = {"is_spike": True, "is_found": True, "rows": [5], "samples": [sample], "value_without": 0.25}
    innocent = {"is_spike": True, "is_found": False, "rows": [1, 2, 3], "samples": []}
    died = WorkerGroupError(0, "n1", "killed by SIGKILL", exit_code=70)
    places = Scripted(named, died, NoPlace("another job needs the resources"), innocent)
    made = Stage(tmp_path, places)
    made.evaluations.cfg = FullConfig(steps=100, health=HealthConfig(on_spike="bisect"))
    made.evaluations.task = {"config": {}, "job": {}, "hooks": {SEARCH: {}}}
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: None)
    monkeypatch.setattr("pipeline.health.read_excluded", lambda folder: [])
    reported = []

    def report(kind: str, values: Any, line: str) -> None:
        reported.append((kind, line))

    telemetry: Any = SimpleNamespace(attempt=1, report=report, log=reported.append)
    job: Any = SimpleNamespace(directory=str(tmp_path), attempt_folder=made.attempt)
    hook = SpikeSearch(made.evaluations.cfg, job)
    progress = Progress(step=0, bad_samples=0, ledger=Ledger(""))
    hook.begin(cast(Any, SimpleNamespace(group=SimpleNamespace(rank=0, telemetry=telemetry))), progress)
    health = Health(made.evaluations.cfg, tmp_path, checkpoints_in(tmp_path), telemetry, [hook])
    for step in range(1, 20):
        health.count_step(step, 1.0, 0.1 if step != 18 else 2.0, "", [])
    assert "no search, because no spare worker is available" in reported[-1][1]
    (made.attempt / async_evaluation.SPARE_FILE).touch()
    for step in range(20, 28):
        health.count_step(step, 1.0, 0.1 if step % 2 else 2.0, "", [])
    assert [line.count("search requested on a spare worker") for _, line in reported[1:]] == [1, 1, 1, 1]

    leftover = tmp_path / "searches" / "step-0000000020" / tmp_path.name / "attempts" / "attempt-000001"
    leftover.mkdir(parents=True)  # of a killed command
    for _ in range(4):
        made.evaluations.poll()
    assert [step for step, _ in places.searched] == [20, 22, 24, 24]
    assert [masked for _, masked in places.searched] == [[], *[[[0, 0, 7, 8]]] * 3]
    log = "\n".join(made.log_lines)
    assert "step 20: its spike is caused by 1 sample, without which grad_norm is 0.25: a.tar k7; masked" in log
    assert "step 22: the spike search on a spare worker FAILED (killed" in log
    assert "step 24: its spike is caused by at least 3 samples together, so no samples are masked" in log
    made.evaluations.finish()
    assert "step 26: search cancelled because training has ended" in made.log_lines
    assert sorted(path.name for path in (tmp_path / "searches").iterdir()) == [
        f"step-00000000{step}.json" for step in (20, 22, 24, 26)
    ]

    for step in (30, 40):
        progress.step = step
        hook.before_save(progress)
    assert progress.masked == [(30, 0, 7, 8)]
    assert reported[5:] == [("masked", "step 30: 1 sample masked from this step, 1 in total: a.tar k7")]


def test_a_step_that_was_never_committed_is_skipped(tmp_path) -> None:
    made = Stage(tmp_path, Scripted())
    async_evaluation.request(tmp_path, 10)
    made.evaluations.poll()
    assert requested_steps(tmp_path) == [10], "the step may be saved soon"
    made.commit(20)
    made.evaluations.poll()
    assert made.answers() == {10: "evaluate_skipped", 20: "evaluate"}


def test_an_evaluation_is_retried_after_a_death_or_lost_resources_but_not_after_an_error(tmp_path) -> None:
    death = WorkerGroupError(0, "n1", "killed by SIGKILL")
    refusal = WorkerGroupError(0, "n1", "DataError: torn", exit_code=65, kind="DataError")
    made = Stage(
        tmp_path, Scripted(NoPlace("another job needs the resources"), death, None, refusal, death, death, death)
    )
    made.commit(10)
    for _ in range(3):
        made.evaluations.poll()
    assert made.answers() == {10: "evaluate"}
    assert "postponed, because another job needs the resources" in made.log_lines[0]
    assert "attempt 1 of 3" in made.log_lines[1]
    made.commit(20)
    made.evaluations.poll()
    assert made.answers() == {20: "evaluate_failed"}
    assert (made.attempt / async_evaluation.SPARE_FILE).exists()
    made.commit(30)
    for _ in range(3):
        made.evaluations.poll()
    assert made.answers() == {30: "evaluate_failed"}
    made.evaluations.poll()
    assert not (made.attempt / async_evaluation.SPARE_FILE).exists(), "from now on the loop evaluates"


def test_a_save_does_not_prune_a_checkpoint_that_waits_for_evaluation(tmp_path) -> None:
    made = Stage(tmp_path, Scripted())
    made.commit(10, 20, 30, 40)
    async_evaluation.withdraw(tmp_path, 20)
    removed = checkpoints_in(tmp_path / "checkpoints").prune(2, 0, requested_steps(tmp_path))
    assert removed == ["step-0000000020"]


def test_the_prune_command_keeps_a_checkpoint_that_waits_for_evaluation(tmp_path, monkeypatch, capsys) -> None:
    made = Stage(tmp_path, Scripted())
    made.commit(10, 20, 30, 40)
    async_evaluation.withdraw(tmp_path, 20)
    monkeypatch.setattr(StageCheckpoints, "verify", lambda checkpoints, name: None)
    stored.prune(str(tmp_path), 2, 0)
    assert capsys.readouterr().out == f"{tmp_path.name}: step-0000000020 deleted\n"


def test_at_the_end_waiting_and_postponed_evaluations_are_finished(tmp_path) -> None:
    made = Stage(tmp_path, Scripted(NoPlace("another job needs the resources"), None))
    made.commit(10, 20, 30, 40, 50)
    for step in (30, 40, 50):
        async_evaluation.withdraw(tmp_path, step)
    made.evaluations.finish()
    assert made.places.evaluated == [10, 10, 20]
    assert [step_of(folder) for folder in committed(tmp_path / "checkpoints")] == [50, 40, 30], "keep is 3"
    assert [record["step"] for record in read_metrics(tmp_path, "evaluate")] == [10, 20]
    assert list((tmp_path / EVALUATIONS).iterdir()) == []


def test_an_evaluation_stopped_with_its_attempt_leaves_no_folder(tmp_path) -> None:
    made = Stage(tmp_path, Scripted())
    made.commit(10)
    made.evaluations.has_ended.set()
    made.evaluations.evaluate(10)
    assert [path.name for path in (tmp_path / EVALUATIONS).iterdir()] == ["step-0000000010.requested"]


def test_a_thread_that_outlives_its_attempt_stays_stopped_and_gets_no_second_thread(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("jobs.extras.async_evaluation.spare_worker.END_S", 0.01)
    made = Stage(tmp_path, Scripted())
    has_question = threading.Event()
    has_answer = threading.Event()

    def slow_head() -> bool:
        has_question.set()
        return has_answer.wait(60)

    monkeypatch.setattr(made.places, "is_free", slow_head)
    with made.during_attempt():
        assert has_question.wait(60)
        made.evaluations.end()
    first = made.evaluations.thread
    with made.during_attempt():
        assert made.evaluations.thread is first
        assert made.evaluations.has_ended.is_set()
        has_answer.set()
        first.join(60)
        assert not first.is_alive(), "the next attempt must not clear its stop event"
        assert not (made.attempt / async_evaluation.SPARE_FILE).exists(), "no thread would evaluate"
    made.commit(10)
    made.evaluations.finish()
    assert made.places.evaluated == [10], "a new thread evaluates it"


def test_a_result_is_kept_until_its_record_is_written(tmp_path, monkeypatch) -> None:
    made = Stage(tmp_path, Scripted())
    async_evaluation.request(tmp_path, 10)
    async_evaluation.skip(tmp_path, 10, "no reason")
    async_evaluation.report_records(tmp_path, lambda kind, values, line: False)
    with monkeypatch.context() as patched:
        patched.setattr(Telemetry, "_append", lambda *args: False)
        made.evaluations.report_records()
    assert "could not report evaluation results" in made.log_lines[-1]
    assert "step-0000000010.json" in made.log_lines[-1]
    made.evaluations.report_records()
    assert [record["step"] for record in read_metrics(tmp_path, "evaluate_skipped")] == [10]
    assert async_evaluation.records(tmp_path) == []


# ------------------------------------------------------------------------ on Ray


@pytest.mark.slow
def test_on_ray_a_free_cpu_evaluates_with_the_same_values(run, sets) -> None:
    """The embedded cluster has two CPUs; the training worker uses one."""
    one = (*EVERY_16, *sets, "cluster.workers=1")
    assert finish(run, *one) == 0, output_of(run)
    expected, losses = evaluated(run), step_losses(stage(run))
    weights = (stage(run) / "weights.safetensors").read_bytes()
    shutil.rmtree(stage(run))
    assert finish(run, *one, "cluster.backend=ray", SPARE) == 0, output_of(run)
    assert where(run) == {16: "spare", 32: "spare", 40: "training"}, output_of(run)
    assert evaluated(run) == expected
    assert step_losses(stage(run)) == losses
    assert (stage(run) / "weights.safetensors").read_bytes() == weights
    assert not (stage(run) / "incidents.txt").exists()
    assert "retried" not in output_of(run)


@pytest.mark.slow
def test_borrowed_ray_resources_are_returned_on_demand_and_a_dead_evaluator_is_reported(tmp_path) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from jobs.cluster.nodes import nodes_of
    from jobs.cluster.ray import connect, disconnect
    from jobs.extras.async_evaluation.spare_places import spare_place_of

    cluster = ClusterConfig(workers=1)
    cpus = int(connect(cluster).cpus)
    try:
        place = spare_place_of(cluster, 0)
        assert place.is_free()

        def has_started(group: WorkerGroup) -> bool:
            return any(state.record is not None for state in group.states.values())

        def run_until(name: str, look: Callable[[WorkerGroup], None]) -> object:
            folder = tmp_path / name / "stage" / "attempts" / "1"
            folder.mkdir(parents=True)
            task = {"ready": str(folder / "ready"), "stop": str(folder / "stop")}
            group = WorkerGroup(place, cluster, folder)
            assert place.take()
            try:
                return group.run(worker_functions.sleep_until_told, task, lambda: look(group))
            finally:
                place.release_borrowed()

        # Another job requests all CPUs; the evaluation uses one of them.
        requests = []

        def ask(group: WorkerGroup) -> None:
            if has_started(group) and not requests:
                assert nodes_of(cluster).room() == cpus, "borrowed resources count as free for a worker group"
                requests.append(placement_group([{"CPU": 1}] * cpus))
            if place.is_needed_elsewhere():
                raise NoPlace("another job needs the resources")

        with pytest.raises(NoPlace):
            run_until("wanted", ask)
        assert requests
        assert ray.get(requests[0].ready(), timeout=20) is not None
        assert not place.is_free()
        remove_placement_group(requests[0])

        def kill(group: WorkerGroup) -> None:
            if has_started(group):
                with suppress(ProcessLookupError):
                    os.kill(group.states[0].pid, signal.SIGKILL)

        deadline = time.monotonic() + 120
        while not place.is_free():
            assert time.monotonic() < deadline, "the other job's CPUs were not released"
            time.sleep(0.1)
        with pytest.raises(WorkerGroupError, match="killed by SIGKILL"):
            run_until("killed", kill)
        deadline = time.monotonic() + 120
        while not place.is_free():
            assert time.monotonic() < deadline, "the evaluator's CPU was not released"
            time.sleep(0.1)
        # After training, its reserved resources can be used.
        nodes = nodes_of(cluster)
        nodes.reserve("test", [1], print, lambda: None)
        rest = placement_group([{"CPU": 1}] * (cpus - 1))
        assert ray.get(rest.ready(), timeout=20) is not None
        deadline = time.monotonic() + 120
        while place.is_free():
            assert time.monotonic() < deadline, "the CPUs are not all in use"
            time.sleep(0.1)
        place.has_training_ended = True
        assert place.is_free()
        assert place.take()
        assert not place.is_needed_elsewhere()
    finally:
        disconnect()
