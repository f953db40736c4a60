"""Works beside the training of one stage: evaluates its commits (`evaluate_on: spare`) and searches its spikes
(`health.on_spike: bisect`), one at a time.

1. While an attempt runs, a thread asks once a second whether a place is free (spare_places.py) and
   leaves a file that says so. Rank 0 then requests the evaluation of a step instead of stopping the workers for it
   (pipeline/extras/async_evaluation.py).
2. The oldest committed step that was requested is given to a worker of its own (pipeline/extras/async_evaluator.py),
   under an agent that stays warm. Another one may wait; where several do, all but the newest are skipped, and each is
   logged.
3. A worker that dies or hangs costs training nothing: that is logged, and the step is tried again. It is also tried
   again, as often as that happens, where somebody wants the place.
4. Records lie in the stage's folder until rank 0 reports them.
5. Where no evaluation waits, a spike is searched (pipeline/extras/replays/search.py) in a folder of its own, from the
   commit before it, which is linked as soon as the request is seen. What comes out lies in the stage's folder: with its
   next save rank 0 masks the samples that are named (pipeline/health.py). A search that fails is not tried again.
6. When the attempt ends badly, so does the evaluation, at once; its request stays for the next attempt, or the next
   command. When training has ended well, the stage waits for the evaluations that are still requested, with the
   workers' own places; a search would come too late.
"""

import dataclasses
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from data.checks import one_line
from data.errors import Preempted
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker import Task, WorkerFunction
from jobs.cluster.worker_group import WorkerGroup
from jobs.cluster_config import ClusterConfig
from jobs.extras.async_evaluation.spare_places import SparePlace, spare_place_of
from jobs.resolved_recipe import Context
from pipeline import artifacts
from pipeline.artifacts import SEARCHES
from pipeline.checkpoints.manifest import ATTEMPTS, attempt_folder, committed, step_of
from pipeline.checkpoints.needed import EVALUATIONS, requested_steps
from pipeline.evaluation.document import evaluation_record
from pipeline.evaluation.in_training import TRIES
from pipeline.extras import async_evaluation
from pipeline.extras.async_evaluator import evaluate_commit
from pipeline.extras.replays.batch import TrainedStage
from pipeline.extras.replays.search import search
from pipeline.extras.replays.spikes import found_samples, names_of
from pipeline.monitoring.telemetry import Telemetry
from pipeline.monitoring.watchdog import Watch
from pipeline.training_config import TrainConfig
from pipeline.values import counted, duration

SEARCH = "pipeline.extras.replays.spikes:SpikeSearch"
POLL_S = 1.0  # between two polls of the thread
WAIT_POLL_S = 0.2  # of the wait for the last evaluations
NEXT_LINE_S = 60.0  # between two lines about that wait
END_S = 10.0  # for the worker to end when its attempt does
NICE = 19  # the lowest priority: what training leaves of the cores


class Ended(Exception):
    """What is done beside training is not wanted any more: its attempt has ended."""


class NoPlace(Exception):
    """The place that seemed to be free is not, or is not any more."""


class SpareWorker:
    """Evaluates commits and searches spikes of a stage, from attempt to attempt."""

    def __init__(self, cfg: TrainConfig, context: Context) -> None:
        self.cfg = cfg
        self.context = context
        self.stage = context.directory
        self.place: SparePlace | None = None  # one for all attempts: its agent has imported torch
        self.deaths: Counter[int] = Counter()  # by step: of workers that were to evaluate it
        self.is_given_up = False  # a worker has died as often as it may
        self.number = 0  # of evaluations and searches that this command has begun
        self.running: int | None = None  # the step that is being evaluated; None: none is, a spike may be searched
        self.has_ended = threading.Event()  # the attempt, or the wait for the last evaluations
        self.training_has_ended = False
        self.thread = threading.Thread()
        self.next_poll = 0.0
        self.trouble = ""  # that was logged last

    @contextmanager
    def during_attempt(self, task: Task, attempt_folder: Path, cluster: ClusterConfig) -> Iterator[None]:
        """Evaluate commits and search spikes while an attempt runs."""
        self.task = task
        self.attempt_folder = attempt_folder
        self.cluster = dataclasses.replace(cluster, workers=1)
        if self.place is None:
            busy_cores = cluster.world * (cluster.cpus_per_worker + self.cfg.data.processes)
            self.place = spare_place_of(cluster, busy_cores)
        self.start_thread()
        try:
            yield
        except BaseException:
            # After a good end the evaluation goes on: `finish` waits for it.
            self.end()
            raise

    def start_thread(self) -> None:
        """Start a thread, unless one lives: that of an attempt before may still wait for an answer of Ray's head."""
        if self.thread.is_alive():
            return
        # One of its own: a thread that was told to end is never told to go on.
        self.has_ended = threading.Event()
        # A daemon, because the driver may end while it waits for an answer of Ray's head.
        self.thread = threading.Thread(target=self.watch, args=(self.has_ended,), name="evaluation", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """End the evaluation that runs, and return when its place is given back."""
        self.has_ended.set()
        if self.thread.is_alive():
            self.thread.join(END_S)

    def finish(self) -> None:
        """Wait until every requested step is evaluated, and report it.

        Raises Preempted where somebody wants this process to end.
        """
        has_requests = bool(requested_steps(self.stage))
        self.training_has_ended = True
        assert self.place is not None
        self.place.has_training_ended = True
        began = time.monotonic()
        next_line = began
        try:
            while self.thread.is_alive() or requested_steps(self.stage):
                self.start_thread()
                left = ", ".join(map(str, requested_steps(self.stage)))
                if self.context.stop_requested():
                    raise Preempted(
                        f"stopped: training has ended, the evaluations of steps {left} have not; "
                        "run the same command again: it goes on with them"
                    )
                if has_requests and time.monotonic() > next_line:
                    waited = duration(time.monotonic() - began)
                    self.context.log(f"training has ended; {waited} of waiting for the evaluations of steps {left}")
                    next_line = time.monotonic() + NEXT_LINE_S
                time.sleep(WAIT_POLL_S)
        finally:
            self.end()
            self.report_records()
            self.place.close()
        for step in self.spikes():
            self.put_outcome(step, {"error": "training has ended"}, "not searched to its end, training has ended")
        if getattr(self.cfg, "evaluate_on", "training") == "training":
            return
        # Checkpoints stayed beyond `keep` because they were to be evaluated.
        try:
            self.context.checkpoints.prune(self.cfg.keep, self.cfg.keep_every, requested_steps(self.stage))
        except OSError as error:
            self.context.log(f"old checkpoints stay: {error}")

    def report_records(self) -> None:
        """Report the records that rank 0 could not report any more."""
        attempt = int(self.attempt_folder.name.rpartition("-")[2])
        if async_evaluation.records(self.stage):
            telemetry = Telemetry(self.stage, 0, attempt)
            async_evaluation.report_records(self.stage, telemetry.report)
            telemetry.close()
        left = [path.name for path in async_evaluation.records(self.stage)]
        if left:
            folder = self.stage / EVALUATIONS
            self.context.log(f"the disk refused the records of evaluations, which stay in {folder}: {', '.join(left)}")
        self.context.poll(attempt, 0)

    # -------------------------------------------------------------------- the thread

    def watch(self, has_ended: threading.Event) -> None:
        """Poll every second, until the attempt has ended or, after training, nothing is requested any more."""
        while not has_ended.is_set():
            trouble = ""
            try:
                self.poll()
                if self.training_has_ended and not requested_steps(self.stage):
                    return
            except Exception as error:
                # The head may be away, or the disk be full: the next poll tries again.
                trouble = f"nothing is done beside training for now: {type(error).__name__}: {error}"
            if trouble not in ("", self.trouble) and not has_ended.is_set():
                self.context.log(trouble)
            self.trouble = trouble or self.trouble
            has_ended.wait(WAIT_POLL_S if self.training_has_ended else POLL_S)

    def poll(self) -> None:
        """Offer a place where one is free, and have the next step evaluated there, or the next spike searched."""
        assert self.place is not None
        is_free = self.place.is_free()
        # The answer may have taken so long that another attempt runs: its workers must not ask this thread.
        if self.has_ended.is_set():
            return
        offer = self.attempt_folder / async_evaluation.SPARE_FILE
        if is_free and not self.is_given_up:
            offer.touch()
        else:
            offer.unlink(missing_ok=True)
        waiting = self.waiting(at_most=2)
        spikes = self.spikes()
        # What was requested before it was given up has its tries when training has ended.
        if waiting and is_free and (self.training_has_ended or not self.is_given_up):
            self.evaluate(waiting[0])
        elif spikes and is_free and not self.training_has_ended:
            self.search(spikes[0])

    def waiting(self, at_most: int) -> list[int]:
        """Return the committed steps that wait to be evaluated, the oldest first; skip those that are too many."""
        steps = {step_of(folder) for folder in committed(self.stage / "checkpoints")}
        newest = max(steps, default=-1)
        waiting = []
        for step in requested_steps(self.stage):
            if step in steps and step != self.running:
                waiting.append(step)
            elif step < newest and step not in steps:
                async_evaluation.skip(self.stage, step, "its checkpoint is not there")
        for step in waiting[:-at_most]:
            reason = f"step {waiting[-1]} was committed before a spare worker could judge it"
            async_evaluation.skip(self.stage, step, reason)
        return waiting[-at_most:]

    def evaluate(self, step: int) -> None:
        """Have one step evaluated and leave its record; where the worker fails, the request stays for the next poll."""
        assert self.place is not None
        # 1. What the worker is told, and where it writes.
        (checkpoint, *_) = [folder for folder in committed(self.stage / "checkpoints") if step_of(folder) == step]
        self.number += 1
        name = f"{self.attempt_folder.name}-step-{step:010d}-{self.number}"
        folder = self.stage / EVALUATIONS / name
        folder.mkdir()
        task = {**self.task, "checkpoint": str(checkpoint), "folder": str(folder)}
        self.running = step
        # 2. Its work, of which the log says nothing more where the worker does not fail.
        try:
            outcome, failure = self.run_there(f"evaluate step {step}", evaluate_nicely, task, folder)
        finally:
            self.running = None
        if outcome is not None:
            for remark in outcome["remarks"]:
                self.context.log(remark)
            where: dict[str, Any] = {"where": "spare", "node": outcome["node"], "seconds": outcome["seconds"]}
            remark = f"  beside training, on {outcome['node']} in {outcome['seconds']:.2f}s"
            record = evaluation_record(step, outcome["values"], where, remark)
            async_evaluation.put_record(self.stage, step, record)
        if failure is None:
            shutil.rmtree(folder, ignore_errors=True)
            return

        # 3. A worker that asked for an exit code knew what it wanted: to try again would end in the same way.
        self.deaths[step] += 1
        if failure.exit_code is None and self.deaths[step] < TRIES:
            self.context.log(
                f"evaluate step {step}: the process beside training failed ({failure.cause}), "
                f"{self.deaths[step]} of {TRIES} times; training is not touched, it is tried again"
            )
            return
        values: dict[str, float | int | str] = {"step": step, "error": failure.cause, "where": "spare"}
        line = f"evaluate step {step} FAILED beside training ({one_line(failure.cause)}); training goes on without it"
        if failure.exit_code is not None:
            values["exit_code"] = int(failure.exit_code)
        else:
            self.is_given_up = True
            line += "; the next ones are judged in the loop"
        async_evaluation.put_record(self.stage, step, {"kind": "evaluate_failed", "values": values, "line": line})

    def spikes(self) -> list[int]:
        """Return the steps whose search is requested, the oldest first; the commit before each is kept for it."""
        steps = []
        for request in sorted((self.stage / SEARCHES).glob("step-*.requested")):
            step = int(request.stem.removeprefix("step-"))
            steps.append(step)
            # At once: a later save may remove the commit.
            stage = TrainedStage(self.stage)
            stage.link_start(stage.commit_before(step), request.with_suffix("") / self.stage.name)
        return steps

    def search(self, step: int) -> None:
        """Have a spike searched and leave what came out; where the place is wanted, the request stays."""
        # 1. The stage as a replay has it: a run of its own, with the commit before the step.
        request = artifacts.read_record(self.stage / SEARCHES / f"step-{step:010d}.requested")
        run = self.stage / SEARCHES / f"step-{step:010d}"
        self.number += 1
        claim = run / ATTEMPTS / f"{self.number:06d}.json"
        claim.parent.mkdir(exist_ok=True)
        claim.touch()
        directory = run / self.stage.name
        folder = attempt_folder(directory, self.number)
        shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed amid the search
        folder.mkdir(parents=True)
        # Without what is known already: a sample that has made several spikes is searched once.
        masked = [[0, *sample["range"]] for sample in found_samples(self.stage)]
        own = {"run": str(run), "directory": str(directory), "attempt": self.number, "until": step}
        hooks = {**self.task["hooks"], SEARCH: {"masked": masked}}
        job = {**self.task["job"], **own, "device_bytes": None}
        task = {**self.task, "job": job, "hooks": hooks, "search": request}

        # 2. The search.
        self.context.log(f"step {step}: its spike is searched beside training")
        outcome, failure = self.run_there(f"step {step}: search", search_nicely, task, folder)
        if failure is not None:
            line = f"the search beside training FAILED ({one_line(failure.cause)}), nothing is masked"
            self.put_outcome(step, {**request, "error": failure.cause}, line)
        if outcome is None:
            return

        # 3. What it came to, in a line.
        if outcome["is_found"]:
            line = (
                f"its spike goes with {counted(len(outcome['samples']), 'sample')}, without which {request['metric']} "
                f"is {outcome['value_without']:.3g}: {names_of(outcome['samples'])}; masked from the next checkpoint on"
            )
        elif outcome["is_spike"]:
            line = f"no single sample is behind its spike, {len(outcome['rows'])} are at the least: nothing is masked"
        else:
            line = "taken again, without what is masked already, it has no spike"
        self.put_outcome(step, {**request, **outcome}, line)

    def put_outcome(self, step: int, outcome: Mapping[str, Any], line: str) -> None:
        """Leave what a search has come to, and take back its request."""
        run = self.stage / SEARCHES / f"step-{step:010d}"
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        artifacts.write_record(run.with_suffix(".json"), {**outcome, "date": date, "said": [f"step {step}: {line}"]})
        run.with_suffix(".requested").unlink(missing_ok=True)
        shutil.rmtree(run, ignore_errors=True)
        self.context.log(f"step {step}: {line}")

    def run_there(
        self, what: str, function: WorkerFunction, task: Task, folder: Path
    ) -> tuple[dict[str, Any] | None, WorkerGroupError | None]:
        """Run a worker on the place, until somebody wants the place or the attempt ends.

        Returns its outcome, or its failure, or neither.
        """
        assert self.place is not None
        watch = Watch(1, self.cfg.stall_s, self.cluster.start_timeout_s)
        group = WorkerGroup(self.place, self.cluster, folder)
        try:
            if not self.place.take():
                raise NoPlace("what seemed to be free was not")
            outcome = group.run(function, task, lambda: self.poll_worker(group, watch))
            return cast(dict[str, Any], outcome), None
        except Ended:
            return None, None
        except NoPlace as reason:
            self.context.log(f"{what}: put off, {reason}; tried again where a place is free")
            return None, None
        except WorkerGroupError as error:
            return None, error
        finally:
            self.place.give_back()

    def poll_worker(self, group: WorkerGroup, watch: Watch) -> None:
        """Look at the worker, and skip requests of evaluations that have become too many.

        Raises Ended, NoPlace where somebody wants the place, and WorkerGroupError where the worker is stuck.
        """
        assert self.place is not None
        if self.has_ended.is_set() or (self.training_has_ended and self.running is None):
            raise Ended
        if self.place.is_wanted():
            raise NoPlace("somebody wants the place")
        stuck = watch.find_stall(group.places(), group.is_frozen)
        if stuck is not None:
            raise group.evidence().silent_failure(stuck.rank, stuck.cause)
        if time.monotonic() > self.next_poll:
            self.next_poll = time.monotonic() + POLL_S
            self.waiting(at_most=1)


def evaluate_nicely(task: Task) -> object:
    """Evaluate one checkpoint at the lowest priority; what the worker of an evaluation does."""
    # On a place of its own it takes nothing from anybody; but cores are shared by whoever is on the machine.
    os.nice(NICE)
    return evaluate_commit(task)


def search_nicely(task: Task) -> object:
    """Search one spike at the lowest priority."""
    os.nice(NICE)
    return search(task)
