"""Evaluate committed checkpoints and find the causes of loss spikes on a spare worker during training.

The worker does one task at a time. The recipe keys are `evaluate_on: spare` and `health.on_spike: bisect`.

1. While an attempt runs, a thread checks once a second whether resources are free (spare_places.py). If so, it creates
   a file, and rank 0 then requests an evaluation instead of pausing the workers for it
   (pipeline/extras/async_evaluation.py).
2. A separate worker evaluates the oldest requested step (pipeline/extras/async_evaluator.py). The agent of this worker
   keeps running between evaluations. Only one further request may wait: if there are several, all except the
   newest are skipped and logged.
3. If the worker dies or hangs, training is not affected: the failure is logged and the step is retried. If the
   worker is preempted because another job needs the resources, the step is retried without limit.
4. The results stay in the stage's folder until rank 0 reports them.
5. If no evaluation is waiting, the worker searches for the cause of a spike (pipeline/extras/replays/search.py) in a
   separate folder. The search starts from the commit before the spike, which is linked as soon as the request is seen.
   Its result is written to the stage's folder; at its next save, rank 0 masks the listed samples (pipeline/health.py).
   A failed search is not repeated.
6. If the attempt fails, the evaluation stops at once; the request is kept for the next attempt or command. When
   training has finished, the stage waits for all requested evaluations, now on the training workers' resources.
   Searches are cancelled, because they would come too late.
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
from pipeline.artifacts import EVALUATIONS, SEARCHES, requested_steps
from pipeline.checkpoints.manifest import ATTEMPTS, attempt_folder, committed, step_of
from pipeline.evaluation.document import evaluation_record
from pipeline.evaluation.in_training import TRIES
from pipeline.extras import async_evaluation
from pipeline.extras.async_evaluator import evaluate_commit
from pipeline.extras.replays.batch import TrainedStage
from pipeline.extras.replays.search import search
from pipeline.extras.replays.spikes import culprit_samples, names_of
from pipeline.monitoring.telemetry import Telemetry
from pipeline.monitoring.watchdog import Watch
from pipeline.training_config import TrainConfig
from pipeline.values import counted, duration

SEARCH = "pipeline.extras.replays.spikes:SpikeSearch"
POLL_S = 1.0  # polling interval of the thread
WAIT_POLL_S = 0.2  # polling interval while waiting for the last evaluations
NEXT_LINE_S = 60.0  # interval of log lines about this wait
END_S = 10.0  # maximum wait for the worker to end after its attempt
NICE = 19  # lowest CPU priority: training has precedence


class Ended(Exception):
    """Raised to stop the spare worker because its attempt has ended."""


class NoPlace(Exception):
    """Raised if the spare resources are not available, or no longer available."""


class SpareWorker:
    """Evaluates a stage's checkpoints and searches for the causes of loss spikes, across all attempts."""

    def __init__(self, cfg: TrainConfig, context: Context) -> None:
        self.cfg = cfg
        self.context = context
        self.stage = context.directory
        self.place: SparePlace | None = None  # kept for all attempts, because its agent has imported torch
        self.deaths: Counter[int] = Counter()  # step → number of workers that died while evaluating it
        self.has_given_up = False  # whether workers have died too often
        self.number = 0  # number of evaluations and searches that this command has started
        self.running: int | None = None  # step being evaluated; None during a search or while idle
        self.has_ended = threading.Event()  # set at the end of the attempt or of the wait for the last evaluations
        self.training_has_ended = False
        self.thread = threading.Thread()
        self.next_poll = 0.0
        self.problem = ""  # the problem logged last

    @contextmanager
    def during_attempt(self, task: Task, attempt_folder: Path, cluster: ClusterConfig) -> Iterator[None]:
        """Evaluate checkpoints and search for the causes of spikes while an attempt runs."""
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
            # After success, the evaluation continues, and `finish` waits for it.
            self.end()
            raise

    def start_thread(self) -> None:
        """Start the thread unless the previous attempt's thread is still waiting for Ray's head."""
        if self.thread.is_alive():
            return
        # Each thread has its own event, so that a stopped thread never continues.
        self.has_ended = threading.Event()
        # A daemon thread, because the driver may exit while the thread waits for Ray's head.
        self.thread = threading.Thread(target=self.watch, args=(self.has_ended,), name="evaluation", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Stop the running evaluation, and wait until its resources are released."""
        self.has_ended.set()
        if self.thread.is_alive():
            self.thread.join(END_S)

    def finish(self) -> None:
        """Wait until all requested steps have been evaluated, and report the results.

        Raises Preempted if a stop is requested.
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
                remaining = ", ".join(map(str, requested_steps(self.stage)))
                if self.context.stop_requested():
                    raise Preempted(
                        f"stopped: training has finished, but the evaluation of steps {remaining} has not; "
                        "run the same command again to finish it"
                    )
                if has_requests and time.monotonic() > next_line:
                    waited = duration(time.monotonic() - began)
                    self.context.log(
                        f"training has finished; waiting for the evaluation of steps {remaining} ({waited})"
                    )
                    next_line = time.monotonic() + NEXT_LINE_S
                time.sleep(WAIT_POLL_S)
        finally:
            self.end()
            self.report_records()
            self.place.close()
        for step in self.spikes():
            self.put_outcome(step, {"error": "training has ended"}, "search cancelled because training has ended")
        if getattr(self.cfg, "evaluate_on", "training") == "training":
            return
        # Delete checkpoints kept only for pending evaluations.
        try:
            self.context.checkpoints.prune(self.cfg.keep, self.cfg.keep_every, requested_steps(self.stage))
        except OSError as error:
            self.context.log(f"could not delete old checkpoints: {error}")

    def report_records(self) -> None:
        """Report the results that rank 0 had not reported before it exited."""
        attempt = int(self.attempt_folder.name.rpartition("-")[2])
        if async_evaluation.records(self.stage):
            telemetry = Telemetry(self.stage, 0, attempt)
            async_evaluation.report_records(self.stage, telemetry.report)
            telemetry.close()
        unreported = [path.name for path in async_evaluation.records(self.stage)]
        if unreported:
            folder = self.stage / EVALUATIONS
            self.context.log(f"could not report evaluation results, which stay in {folder}: {', '.join(unreported)}")
        self.context.poll(attempt, 0)

    # -------------------------------------------------------------------- the thread

    def watch(self, has_ended: threading.Event) -> None:
        """Poll every second until the attempt has ended or, after training, until no request is left."""
        while not has_ended.is_set():
            problem = ""
            try:
                self.poll()
                if self.training_has_ended and not requested_steps(self.stage):
                    return
            except Exception as error:
                # Ray's head may be down, or the disk full; the next poll retries.
                problem = f"evaluation during training is paused: {type(error).__name__}: {error}"
            if problem not in ("", self.problem) and not has_ended.is_set():
                self.context.log(problem)
            self.problem = problem or self.problem
            has_ended.wait(WAIT_POLL_S if self.training_has_ended else POLL_S)

    def poll(self) -> None:
        """Offer free resources to rank 0, and run the next evaluation or spike search on them."""
        assert self.place is not None
        is_free = self.place.is_free()
        # `is_free` may have taken long; if the attempt has ended, do not offer its resources to the next one.
        if self.has_ended.is_set():
            return
        offer = self.attempt_folder / async_evaluation.SPARE_FILE
        if is_free and not self.has_given_up:
            offer.touch()
        else:
            offer.unlink(missing_ok=True)
        waiting = self.waiting(at_most=2)
        spikes = self.spikes()
        # After giving up, requests are retried only when training has ended.
        if waiting and is_free and (self.training_has_ended or not self.has_given_up):
            self.evaluate(waiting[0])
        elif spikes and is_free and not self.training_has_ended:
            self.search(spikes[0])

    def waiting(self, at_most: int) -> list[int]:
        """Return the committed steps with evaluation requests, oldest first; skip all but the newest `at_most`."""
        steps = {step_of(folder) for folder in committed(self.stage / "checkpoints")}
        newest = max(steps, default=-1)
        waiting = []
        for step in requested_steps(self.stage):
            if step in steps and step != self.running:
                waiting.append(step)
            elif step < newest and step not in steps:
                async_evaluation.skip(self.stage, step, "its checkpoint no longer exists")
        for step in waiting[:-at_most]:
            reason = f"step {waiting[-1]} was committed before a spare worker could evaluate it"
            async_evaluation.skip(self.stage, step, reason)
        return waiting[-at_most:]

    def evaluate(self, step: int) -> None:
        """Evaluate one step and store the result; if the worker fails, keep the request for the next poll."""
        assert self.place is not None
        # 1. Prepare the task and its folder.
        (checkpoint, *_) = [folder for folder in committed(self.stage / "checkpoints") if step_of(folder) == step]
        self.number += 1
        name = f"{self.attempt_folder.name}-step-{step:010d}-{self.number}"
        folder = self.stage / EVALUATIONS / name
        folder.mkdir()
        task = {**self.task, "checkpoint": str(checkpoint), "folder": str(folder)}
        self.running = step
        # 2. Run the worker.
        try:
            outcome, failure = self.run_on_spare(f"evaluate step {step}", evaluate_at_low_priority, task, folder)
        finally:
            self.running = None
        if outcome is not None:
            for remark in outcome["remarks"]:
                self.context.log(remark)
            where: dict[str, Any] = {"where": "spare", "node": outcome["node"], "seconds": outcome["seconds"]}
            remark = f"  during training, on {outcome['node']} in {outcome['seconds']:.2f}s"
            record = evaluation_record(step, outcome["values"], where, remark)
            async_evaluation.put_record(self.stage, step, record)
        if failure is None:
            shutil.rmtree(folder, ignore_errors=True)
            return

        # 3. Handle a failure. If the worker requested an exit code, a retry would fail in the same way.
        self.deaths[step] += 1
        if failure.exit_code is None and self.deaths[step] < TRIES:
            self.context.log(
                f"evaluation of step {step}: the spare worker failed ({failure.cause}), attempt {self.deaths[step]} of "
                f"{TRIES}; training is not affected, and the evaluation will be retried"
            )
            return
        values: dict[str, float | int | str] = {"step": step, "error": failure.cause, "where": "spare"}
        line = f"evaluate step {step} FAILED on a spare worker ({one_line(failure.cause)}); training continues"
        if failure.exit_code is not None:
            values["exit_code"] = int(failure.exit_code)
        else:
            self.has_given_up = True
            line += "; the training workers evaluate the next steps"
        async_evaluation.put_record(self.stage, step, {"kind": "evaluate_failed", "values": values, "line": line})

    def spikes(self) -> list[int]:
        """Return the steps with spike search requests, oldest first; preserve the commit before each step."""
        steps = []
        for request in sorted((self.stage / SEARCHES).glob("step-*.requested")):
            step = int(request.stem.removeprefix("step-"))
            steps.append(step)
            # Link the commit immediately, because a later save may delete it.
            stage = TrainedStage(self.stage)
            stage.link_start(stage.commit_before(step), request.with_suffix("") / self.stage.name)
        return steps

    def search(self, step: int) -> None:
        """Search for the cause of a spike and store the result; keep the request if another job needs the resources."""
        # 1. Prepare the stage as for a replay: a separate run with the commit before the step.
        request = artifacts.read_record(self.stage / SEARCHES / f"step-{step:010d}.requested")
        run = self.stage / SEARCHES / f"step-{step:010d}"
        self.number += 1
        claim = run / ATTEMPTS / f"{self.number:06d}.json"
        claim.parent.mkdir(exist_ok=True)
        claim.touch()
        directory = run / self.stage.name
        folder = attempt_folder(directory, self.number)
        shutil.rmtree(folder, ignore_errors=True)  # left by a command killed during the search
        folder.mkdir(parents=True)
        # Mask samples found by earlier searches, so that a sample that caused several spikes is found only once.
        masked = [[0, *sample["range"]] for sample in culprit_samples(self.stage)]
        overrides = {"run": str(run), "directory": str(directory), "attempt": self.number, "until": step}
        hooks = {**self.task["hooks"], SEARCH: {"masked": masked}}
        job = {**self.task["job"], **overrides, "device_bytes": None}
        task = {**self.task, "job": job, "hooks": hooks, "search": request}

        # 2. Run the search.
        self.context.log(f"step {step}: searching for the cause of its spike on a spare worker")
        outcome, failure = self.run_on_spare(f"step {step}: search", search_at_low_priority, task, folder)
        if failure is not None:
            line = f"the spike search on a spare worker FAILED ({one_line(failure.cause)}); no samples are masked"
            self.put_outcome(step, {**request, "error": failure.cause}, line)
        if outcome is None:
            return

        # 3. Log the result.
        if outcome["is_found"]:
            line = (
                f"its spike is caused by {counted(len(outcome['samples']), 'sample')}, without which "
                f"{request['metric']} is {outcome['value_without']:.3g}: {names_of(outcome['samples'])}; masked after "
                "the next checkpoint"
            )
        elif outcome["is_spike"]:
            line = f"its spike is caused by at least {len(outcome['rows'])} samples together, so no samples are masked"
        else:
            line = "no spike occurs without the samples already masked"
        self.put_outcome(step, {**request, **outcome}, line)

    def put_outcome(self, step: int, outcome: Mapping[str, Any], line: str) -> None:
        """Store and log the result of a search, and delete its request."""
        run = self.stage / SEARCHES / f"step-{step:010d}"
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        artifacts.write_record(run.with_suffix(".json"), {**outcome, "date": date, "said": [f"step {step}: {line}"]})
        run.with_suffix(".requested").unlink(missing_ok=True)
        shutil.rmtree(run, ignore_errors=True)
        self.context.log(f"step {step}: {line}")

    def run_on_spare(
        self, what: str, function: WorkerFunction, task: Task, folder: Path
    ) -> tuple[dict[str, Any] | None, WorkerGroupError | None]:
        """Run a worker on the spare resources until it finishes, another job needs the resources, or the attempt ends.

        Returns (outcome, None), (None, failure), or (None, None) if the worker was interrupted.
        """
        assert self.place is not None
        watch = Watch(1, self.cfg.stall_s, self.cluster.start_timeout_s)
        group = WorkerGroup(self.place, self.cluster, folder)
        try:
            if not self.place.take():
                raise NoPlace("another job took the free resources")
            outcome = group.run(function, task, lambda: self.poll_worker(group, watch))
            return cast(dict[str, Any], outcome), None
        except Ended:
            return None, None
        except NoPlace as reason:
            self.context.log(f"{what}: postponed, because {reason}; retrying when resources are free")
            return None, None
        except WorkerGroupError as error:
            return None, error
        finally:
            self.place.release_borrowed()

    def poll_worker(self, group: WorkerGroup, watch: Watch) -> None:
        """Check the worker, and skip the oldest evaluation requests if there are too many.

        Raises Ended if the attempt has ended, NoPlace if another job needs the resources, or WorkerGroupError if the
        worker is stuck.
        """
        assert self.place is not None
        if self.has_ended.is_set() or (self.training_has_ended and self.running is None):
            raise Ended
        if self.place.is_needed_elsewhere():
            raise NoPlace("another job needs the resources")
        stuck = watch.find_stall(group.phases(), group.is_frozen)
        if stuck is not None:
            raise group.evidence().silent_failure(stuck.rank, stuck.cause)
        if time.monotonic() > self.next_poll:
            self.next_poll = time.monotonic() + POLL_S
            self.waiting(at_most=1)


def evaluate_at_low_priority(task: Task) -> object:
    """Evaluate a checkpoint at the lowest CPU priority; runs on the spare worker."""
    # On a shared machine, the evaluation could otherwise slow down training.
    os.nice(NICE)
    return evaluate_commit(task)


def search_at_low_priority(task: Task) -> object:
    """Search for the cause of a spike at the lowest CPU priority; runs on the spare worker."""
    os.nice(NICE)
    return search(task)
