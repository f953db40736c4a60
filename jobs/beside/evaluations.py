"""Has the commits of one trained stage judged beside training (`evaluate_on: spare`), one at a time.

1. While an attempt runs, a thread looks once a second whether a place is free (places.py), and says so in a file:
   rank 0 then requests the evaluation of a step instead of stopping the workers for it (async_evaluation.py).
2. It has the oldest commit that was asked for judged, in a process of its own (pipeline/evaluate.py). One more may
   wait; where several do, all but the newest are skipped, and each is said.
3. A process that dies or hangs costs training nothing: it is said, and tried again. So is one whose place somebody
   wants, as often as that happens.
4. Answers lie in the stage's folder until rank 0 reports them.
5. When the attempt ends badly, so does the process, at once; the question stays for the next attempt, or the next
   command. When training has ended well, the stage waits for what is still asked for, on the workers' own places.
"""

import os
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from data.checks import one_line
from data.errors import Preempted
from jobs.beside.places import NoPlace, Places
from jobs.beside.spare_core import SpareCore
from jobs.cluster_config import ClusterConfig
from jobs.context import Context
from jobs.workers.failures import is_stopped_by_signal, worker_failure
from jobs.workers.worker_files import records
from jobs.workers.worker_group import Task, WorkerGroupError
from pipeline.checkpoints.manifest import committed, step_of
from pipeline.evaluate import AsyncOutcome, evaluate_commit
from pipeline.evaluation import async_evaluation
from pipeline.monitoring.telemetry import Telemetry, duration
from pipeline.monitoring.watchdog import Watch
from pipeline.training_config import TrainConfig

LOOK_S = 1.0  # between two looks of the thread
POLL_S = 0.2  # of the wait for the last evaluations
NEXT_WORD_S = 60.0  # between two lines about that wait
END_S = 10.0  # for the process to end when its attempt does
TRIES = 3  # of one evaluation whose process dies or hangs; then the loop does without
NICE = 19  # the lowest priority: what training leaves of the cores


class Ended(Exception):
    """Nobody wants the evaluation any more: its attempt has ended."""


class Evaluations:
    """Judges commits of a stage, from attempt to attempt; also the companion of the attempt that runs."""

    def __init__(self, cfg: TrainConfig, context: Context) -> None:
        self.cfg = cfg
        self.context = context
        self.stage = context.directory
        self.deaths: Counter[int] = Counter()  # by step: of processes that were to judge it
        self.is_given_up = False  # a process has died as often as it may
        self.number = 0  # of evaluations that this command has begun
        self.running: int | None = None  # the step that is being judged
        self.has_ended = threading.Event()  # the attempt, or the wait for the last evaluations
        self.training_has_ended = False
        self.thread = threading.Thread()
        self.next_look = 0.0
        self.trouble = ""  # that was said last

    # -------------------------------------------------------------------- beside an attempt

    def accompany(self, task: Task, attempt_folder: Path, cluster: ClusterConfig) -> Self:
        """Get ready to work beside an attempt."""
        self.task = task
        self.attempt_folder = attempt_folder
        self.cluster = cluster
        busy_cores = cluster.world * (cluster.cpus_per_worker + self.cfg.data.processes)
        self.places: Places = places_of(cluster, self.context.run.name, busy_cores)
        return self

    def __enter__(self) -> Self:
        # A disk that refuses costs that evaluation, not the attempt.
        with suppress(OSError):
            async_evaluation.request_unfinished(self.stage)
        self.start_thread()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After a good end the evaluation goes on: `finish` waits for it.
        if kind is not None:
            self.end()

    def start_thread(self) -> None:
        """Start a thread, unless one lives: that of an attempt before may still wait for an answer of Ray's head."""
        if self.thread.is_alive():
            return
        # One of its own: what has told a thread to end is never taken back.
        self.has_ended = threading.Event()
        # A daemon, because the driver may end while it waits for an answer of Ray's head.
        self.thread = threading.Thread(target=self.watch, args=(self.has_ended,), name="evaluations", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """End the evaluation that runs, and return when its place is given back."""
        self.has_ended.set()
        if self.thread.is_alive():
            self.thread.join(END_S)

    def finish(self) -> None:
        """Wait until all that was asked for is judged, and report it. Raises Preempted where somebody wants the end."""
        steps = async_evaluation.requested(self.stage)
        self.training_has_ended = True
        self.places.training_has_ended()
        began = time.monotonic()
        next_word = began
        try:
            while self.thread.is_alive() or async_evaluation.requested(self.stage):
                self.start_thread()
                if self.context.stopping():
                    left = listed(async_evaluation.requested(self.stage))
                    raise Preempted(
                        f"stopped: training has ended, the evaluations of steps {left} have not; "
                        "run the same command again: it goes on with them"
                    )
                if steps and time.monotonic() > next_word:
                    left = listed(async_evaluation.requested(self.stage))
                    waited = duration(time.monotonic() - began)
                    self.context.say(f"training has ended; {waited} of waiting for the evaluations of steps {left}")
                    next_word = time.monotonic() + NEXT_WORD_S
                time.sleep(POLL_S)
        finally:
            self.end()
            self.report_answers()
        self.delete_old()

    def report_answers(self) -> None:
        """Report what rank 0 could not any more."""
        attempt = int(self.attempt_folder.name.rpartition("-")[2])
        if async_evaluation.records(self.stage):
            telemetry = Telemetry(self.stage, 0, attempt)
            async_evaluation.report_records(self.stage, telemetry.report)
            telemetry.close()
        left = [path.name for path in async_evaluation.records(self.stage)]
        if left:
            folder = self.stage / async_evaluation.FOLDER
            self.context.say(f"the disk refused the records of evaluations, which stay in {folder}: {', '.join(left)}")
        self.context.tick(self.attempt_folder, attempt)

    def delete_old(self) -> None:
        """Delete the checkpoints that stayed beyond `keep` because they were to be judged."""
        try:
            self.context.checkpoints.prune(self.cfg.keep, self.cfg.keep_every, async_evaluation.due(self.stage))
        except OSError as error:
            self.context.say(f"old checkpoints stay: {error}")

    # -------------------------------------------------------------------- the thread

    def watch(self, has_ended: threading.Event) -> None:
        """Look every second, until the attempt has ended or, after training, nothing is asked for any more."""
        while not has_ended.is_set():
            try:
                self.look()
                if self.training_has_ended and not async_evaluation.requested(self.stage):
                    return
            except Exception as error:
                # The head may be away, or the disk be full: the next look tries again.
                self.tell(f"no evaluation beside training for now: {type(error).__name__}: {error}")
            has_ended.wait(POLL_S if self.training_has_ended else LOOK_S)

    def tell(self, trouble: str) -> None:
        """Say what is wrong, the same thing once."""
        if trouble != self.trouble and not self.has_ended.is_set():
            self.context.say(trouble)
        self.trouble = trouble

    def look(self) -> None:
        """Say whether a place is free, and have the next step judged where one is."""
        is_free = self.places.are_free()
        # The answer may have taken so long that another attempt runs: its workers must not ask this thread.
        if self.has_ended.is_set():
            return
        self.show(is_free and not self.is_given_up)
        waiting = self.waiting(at_most=2)
        # What was asked for before it was given up has its tries when training has ended.
        is_worth_it = self.training_has_ended or not self.is_given_up
        if waiting and is_free and is_worth_it:
            self.judge(waiting[0])

    def show(self, is_free: bool) -> None:
        """Tell rank 0 whether somebody would judge a commit."""
        path = self.attempt_folder / async_evaluation.SPARE_FILE
        if is_free:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def waiting(self, at_most: int) -> list[int]:
        """Return the committed steps that wait to be judged, the oldest first; skip those that are too many."""
        steps = {step_of(folder) for folder in committed(self.stage / "checkpoints")}
        newest = max(steps, default=-1)
        waiting = []
        for step in async_evaluation.requested(self.stage):
            if step in steps and step != self.running:
                waiting.append(step)
            elif step < newest and step not in steps:
                async_evaluation.skip(self.stage, step, "its checkpoint is not there")
        for step in waiting[:-at_most]:
            async_evaluation.skip(
                self.stage, step, f"step {waiting[-1]} was committed before a spare worker could judge it"
            )
        return waiting[-at_most:]

    # -------------------------------------------------------------------- one evaluation

    def judge(self, step: int) -> None:
        """Have one step judged, and leave the answer; where the process fails, leave the question for the next look."""
        (checkpoint, *_) = [folder for folder in committed(self.stage / "checkpoints") if step_of(folder) == step]
        self.number += 1
        name = f"{self.attempt_folder.name}-step-{step:010d}-{self.number}"
        folder = self.stage / async_evaluation.FOLDER / name
        folder.mkdir()
        task = {**self.task, "checkpoint": str(checkpoint), "folder": str(folder)}
        watch = Watch(folder, 1, self.cfg.stall_s, self.cluster.start_timeout_s)
        self.running = step

        def on_tick() -> None:
            self.look_at_evaluation(folder, watch)

        try:
            judged = cast(AsyncOutcome, self.places.run(judge_beside, task, folder, on_tick))
            self.answer(step, judged)
            # Of one that did not fail the record and the log say nothing more.
            shutil.rmtree(folder, ignore_errors=True)
        except Ended:
            shutil.rmtree(folder, ignore_errors=True)
        except NoPlace as reason:
            shutil.rmtree(folder, ignore_errors=True)
            self.context.say(f"evaluate step {step}: put off, {reason}; tried again where a place is free")
        except WorkerGroupError as error:
            self.judge_failure(step, error)
        finally:
            self.running = None

    def look_at_evaluation(self, folder: Path, watch: Watch) -> None:
        """Look once at the process that judges.

        Raises Ended, NoPlace where somebody wants the place, and WorkerGroupError where it is stuck.
        """
        if self.has_ended.is_set():
            raise Ended
        if self.places.are_wanted():
            raise NoPlace("somebody wants the place")
        written = records(folder, 1)
        stuck = watch.look(lambda rank: is_stopped_by_signal(written.get(rank)))
        if stuck is not None:
            raise worker_failure(folder, 0, written, stuck.cause)
        if time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + LOOK_S
            self.waiting(at_most=1)

    def answer(self, step: int, judged: AsyncOutcome) -> None:
        """Leave the answer for rank 0."""
        for remark in judged["remarks"]:
            self.context.say(remark)
        where: dict[str, Any] = {"where": "spare", "node": judged["node"], "seconds": judged["seconds"]}
        remark = f"  beside training, on {judged['node']} in {judged['seconds']:.2f}s"
        line = async_evaluation.evaluation_line(step, async_evaluation.metrics_of(judged["values"]), remark)
        values = {"step": step, **judged["values"], **where}
        async_evaluation.put_record(self.stage, step, {"kind": "evaluate", "values": values, "line": line})

    def judge_failure(self, step: int, error: WorkerGroupError) -> None:
        """Say why a process has failed; where trying again would not help, answer that."""
        self.deaths[step] += 1
        is_known = error.exit_code is not None  # it knew what it wanted: to try again would end in the same way
        if not is_known and self.deaths[step] < TRIES:
            self.context.say(
                f"evaluate step {step}: the process beside training failed ({error.cause}), "
                f"{self.deaths[step]} of {TRIES} times; training is not touched, it is tried again"
            )
            return
        values: dict[str, float | int | str] = {"step": step, "error": error.cause, "where": "spare"}
        line = f"evaluate step {step} FAILED beside training ({one_line(error.cause)}); training goes on without it"
        if is_known:
            values["exit_code"] = int(error.exit_code or 0)
        else:
            self.is_given_up = True
            line += "; the next ones are judged in the loop"
        async_evaluation.put_record(self.stage, step, {"kind": "evaluate_failed", "values": values, "line": line})


def places_of(cluster: ClusterConfig, run: str, busy_cores: int) -> Places:
    """Return the places beside a worker group of `cluster.world`, which keeps so many cores of this machine busy."""
    if cluster.backend == "processes":
        return SpareCore(cluster, busy_cores)
    from jobs.beside.ray_places import RayPlaces  # Ray takes seconds to import

    return RayPlaces(cluster, run)


def judge_beside(task: Task) -> object:
    """Judge one checkpoint at the lowest priority; what the process of an evaluation does."""
    # On a place of its own it takes nothing from anybody; but cores are shared by whoever is on the machine.
    os.nice(NICE)
    return evaluate_commit(task)


def listed(steps: list[int]) -> str:
    """Return "10, 20"."""
    return ", ".join(str(step) for step in steps)
