"""Faults of drivers and workers for the fault tests; every function patches Patchline.

`tests.support.drives.drive` calls the function that a test names. The workers are forks of the driver, so that one
patch reaches all of them.
"""

import dataclasses
import errno
import fcntl
import functools
import importlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data import storage as folder_storage
from data.decoder import Decoder
from data.evaluation import EvaluationBatch, EvaluationSet
from data.loader import Batch
from jobs import ownership, terminal
from jobs.cluster import agent, worker_group
from pipeline import batches as training_batches
from pipeline import start, train
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.evaluation import evaluator as evaluation
from pipeline.evaluation import features, in_training, protocols
from pipeline.health import Health
from pipeline.monitoring.watchdog import STOP_FILE, node_folder


def write_durably_by(function: Callable[[Path, Any], None]) -> None:
    """Replace the function that writes all files of a save, including the manifest."""
    folder_storage.write_durably = function


def slow_to_delete(more: str = "") -> None:
    """Make rank 0 delete an old checkpoint more slowly than the others wait; record deletions in "deletions"."""
    delete = shutil.rmtree

    def rmtree(path: Path, **options: bool) -> None:
        if threading.current_thread().name != "old checkpoints":
            return delete(path, **options)
        with open("deletions", "a", buffering=1) as file:
            file.write("begun ")
            file.flush()
            time.sleep(1.5)
            delete(path, **options)
            file.write("done ")

    folder_storage.shutil.rmtree = rmtree  # type: ignore[assignment]
    if more:
        globals()[more]()


def full_disk() -> None:
    """Make all writes of checkpoint files fail with a full disk."""

    def refuse(path: Path, blob: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    write_durably_by(refuse)


def full_disk_for_a_while() -> None:
    """Fail worker 1's saves of steps 10 and 15, and rank 0's manifest of step 20."""
    original = folder_storage.write_durably

    def refuse(path: Path, blob: bytes) -> None:
        step, rank = int(path.parent.name.split("-")[1]), os.environ["RANK"]
        if (step in (10, 15) and rank == "1") or (step == 20 and path.name == "MANIFEST.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, blob)

    write_durably_by(refuse)


def full_disk_at_the_end(step: int, times: int) -> None:
    """Fail rank 0's write of this step's file this many times."""
    original, left = folder_storage.write_durably, [times]

    def refuse(path: Path, blob: bytes) -> None:
        if int(path.parent.name.split("-")[1]) == step and path.stem == "rank-00000" and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, blob)

    write_durably_by(refuse)


def fates(seed: int) -> dict[str, tuple[str, str]]:
    """Return the faults of five saves: (file whose write fails, kind of fault)."""
    rng = random.Random(seed)
    files, hows = ("rank-00000", "rank-00001", "MANIFEST"), ("slow", "before", "amid", "after")
    return {f"{step:010d}": (rng.choice(files), rng.choice(hows)) for step in (5, 10, 20, 25, 35)}


def suffering_in_saves(seed: int) -> None:
    """Slow down or kill, once, the rank that writes the file: before, during or after the write."""
    original, all_fates = folder_storage.write_durably, fates(seed)

    def suffer(path: Path, blob: bytes) -> None:
        step = path.parent.name.split("-")[1]
        file, how = all_fates.get(step, ("", ""))
        once = path.parents[2] / f"suffered-{step}"
        if path.stem != file or once.exists():
            return original(path, blob)
        once.touch()
        if how == "slow":
            time.sleep(0.3)
        if how == "amid":
            path.write_bytes(bytes(blob)[: len(blob) // 2])
        if how in ("slow", "after"):
            original(path, blob)
        if how != "slow":
            os.kill(os.getpid(), signal.SIGKILL)

    write_durably_by(suffer)


def slowly(clock_s: int = 0) -> None:
    """Slow each step by 60 ms, let the driver check for a stop every 100 ms, and set a wrong clock."""
    now = time.time
    time.time = lambda: now() + clock_s
    worker_group.TICK_S = 0.1
    before(train, "finish_step", lambda *args: True, lambda: time.sleep(0.06))


def unread_terminal() -> None:
    """Slow the steps down, and make stdout and stderr a full pipe without a reader."""
    slowly()
    terminal.CLOSE_S = 0.5
    _, writer = os.pipe()  # the read end stays open as long as this process
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * size)
    os.dup2(writer, 1), os.dup2(writer, 2)


def hasty_lease() -> None:
    """Renew the lease three times a second; it is lost after the usual number of missed renewals."""
    ownership.PERIOD_S = 0.3


def in_no_hurry() -> None:
    """Hold the first step until the file "go" exists next to the run."""

    def wait() -> None:
        while not Path("go").exists():
            time.sleep(0.02)

    before(train, "finish_step", at(1, 0, 0), wait)


def before(owner: Any, name: str, when: Callable[..., bool], act: Callable[[], Any]) -> None:
    """Call `act` before those calls of a method or function for which `when` is true."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        if when(*args):
            act()
        return original(*args, **more)

    setattr(owner, name, wrapped)


def at(attempt: int, steps: int | None = None, rank: int | None = None) -> Callable[..., bool]:
    """Return a condition on a worker: its attempt, number of complete steps and rank (None: any)."""

    def is_there(worker: start.Worker, *args: Any) -> bool:
        whole_steps = worker.health.recent[-1].step if worker.health.recent else 0
        return worker.job.attempt == attempt and steps in (None, whole_steps) and rank in (None, worker.group.rank)

    return is_there


def hanging(places: str) -> None:
    """Make the first attempt hang at the first place, the second attempt at the second place, and so on."""
    attempts = {place: number for number, place in enumerate(places.split(","), 1)}
    before(train, "finish_step", at(attempts.get("reduce", 0), 11, 1), lambda: os.kill(os.getpid(), signal.SIGSTOP))
    before(start, "build_model", lambda *args: args[-1].attempt == attempts.get("build") and on_rank_1(), sleep)
    before(StageCheckpoints, "choose", lambda checkpoints, attempt, *args: attempt == attempts.get("restore"), sleep)
    before(train, "finish_step", at(attempts.get("collective", 0), 31), sleep)
    before(train, "export_weights", at(attempts.get("finish", 0)), sleep)
    batches, agreed = train.micro_batches, evaluation.Evaluator.in_lockstep

    def micro_batches(worker: start.Worker, start_step: int) -> Any:
        for batch in batches(worker, start_step):
            if batch.step == 22 and at(attempts.get("data", 0), rank=1)(worker):
                sleep()
            yield batch

    def in_lockstep(evaluator: evaluation.Evaluator, *args: Any) -> Any:
        for batch in agreed(evaluator, *args):
            if evaluator.folder.name == f"attempt-{attempts.get('evaluate', 0):06d}" and on_rank_1():
                sleep()
            yield batch

    train.micro_batches = micro_batches  # type: ignore[assignment]
    evaluation.Evaluator.in_lockstep = in_lockstep  # type: ignore[method-assign]


def on_rank_1() -> bool:
    return os.environ["RANK"] == "1"


def sleep() -> None:
    time.sleep(600)


def killed_amid_a_window() -> None:
    """Kill worker 0 of the first attempt in step 18: after the commit of step 15, between two log lines."""
    before(train, "finish_step", at(1, 17, 0), lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped_in_an_evaluation() -> None:
    """Append a worker's rank to the file "judged" for each evaluated batch; rank 0 waits in its third for the stop."""
    original = features.normalise
    judged = [0]

    def normalise(*args: Any) -> torch.Tensor:
        judged[0] += 1
        with open("judged", "a") as file:
            file.write(os.environ["RANK"])
        while judged[0] == 3 and not on_rank_1() and not (node_folder(Path()) / STOP_FILE).exists():
            time.sleep(0.02)
        return original(*args)

    features.normalise = normalise  # type: ignore[assignment]


def without_kernels(more: str = "", *arguments: int) -> None:
    """Use torch.compile without its C++ kernels, which take minutes to build."""
    # Import once, before the driver forks its workers: the import takes each of them a second or two.
    importlib.import_module("torch._inductor.lowering")
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    if more:
        globals()[more](*arguments)


def driver_killed_before_the_evaluation_of(step: int) -> None:
    """Kill the driver after the commit of a step, when its evaluation is about to begin."""
    driver = os.getpid()

    def strike() -> None:
        if dist.get_rank() == 0:
            os.kill(driver, signal.SIGKILL)
        sleep()

    before(in_training.LoopEvaluator, "evaluate_during_training", lambda *args: args[-1].step == step, strike)


def driver_killed_at_the_end() -> None:
    """Kill the driver after the last commit and evaluation, before the export."""
    driver = os.getpid()

    def strike() -> None:
        os.kill(driver, signal.SIGKILL)
        sleep()

    before(train, "export_weights", lambda *args: True, strike)


def spare_core() -> None:
    """Pretend that this machine has idle cores."""
    os.sched_getaffinity = lambda pid: set(range(64))  # type: ignore[assignment]


def evaluator_dies(how: str = "SIGKILL", times: int = 1) -> None:
    """Send this signal to the first processes that evaluate a commit, after they begin; each leaves a file."""
    spare_core()

    def strike() -> None:
        struck = len(list(Path().glob("struck-*")))
        if struck < times:
            Path(f"struck-{struck}").touch()
            os.kill(os.getpid(), getattr(signal, how))

    in_commits(strike)


def slow_evaluator() -> None:
    """Hold evaluations of commits until the file "go" exists next to the run; they announce it in "judging"."""
    spare_core()

    def wait() -> None:
        Path("judging").touch()
        while not Path("go").exists():
            time.sleep(0.02)

    in_commits(wait)


def in_commits(act: Callable[[], None]) -> None:
    """Run a function in each process that evaluates a commit, before the few-shot probe."""
    row = protocols.PROTOCOLS["fewshot"]

    def compute(*args: Any) -> Any:
        if not dist.is_initialized():  # training workers are in a process group
            act()
        return row.compute(*args)

    protocols.PROTOCOLS["fewshot"] = dataclasses.replace(row, compute=compute)


def no_first_batch() -> None:
    """Hold worker 1's first batch until the file "arrived" exists next to the run; it announces this in "waiting"."""
    original = Decoder.run

    def run(decoder: Decoder, *args: Any) -> Any:
        while on_rank_1() and not Path("arrived").exists():
            Path("waiting").touch()
            time.sleep(0.02)
        return original(decoder, *args)

    Decoder.run = run  # type: ignore[method-assign]


def no_batch_behind_a_stretch() -> None:
    """Never deliver worker 1's first batch after an excluded stretch; the worker announces it in "waiting"."""
    original = Decoder.run
    loaders = [0]

    def count() -> None:
        loaders[0] += 1
        if loaders[0] == 2:
            Path("hold").touch()

    def run(decoder: Decoder, *args: Any) -> Any:
        while on_rank_1() and Path("hold").exists():
            Path("waiting").touch()
            time.sleep(0.02)
        return original(decoder, *args)

    before(train, "micro_batches", lambda *args: True, count)
    Decoder.run = run  # type: ignore[method-assign]


def short_of_memory() -> None:
    """Simulate lack of memory: an OOM kill (counted in a fake /proc/vmstat), and errors of torch, Python and CUDA."""
    agent.VMSTAT = vmstat = Path("vmstat").absolute()

    def killed() -> None:
        vmstat.write_text("oom_kill_disable 0\noom_kill 1\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def cuda() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    before(train, "finish_step", at(1, 11, 1), killed)
    before(train, "finish_step", at(2, 16, 0), lambda: torch.empty(1 << 50))
    before(train, "finish_step", at(3, 21, 1), lambda: bytearray(1 << 50))
    before(train, "finish_step", at(4, 26, 1), cuda)


def troubled_probe() -> None:
    """Few-shot: kill worker 1 in the first attempt, hang it in the second, and slow it down in later ones."""
    original = EvaluationSet.__iter__

    def batches(samples: EvaluationSet) -> Iterator[EvaluationBatch]:
        attempt = len(list(Path("run").glob("fewshot-*/attempts/attempt-*")))
        for batch in original(samples):
            if attempt == 1 and on_rank_1():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600 if attempt == 2 and on_rank_1() else 0.05)
            yield batch

    EvaluationSet.__iter__ = batches  # type: ignore[method-assign]


def slow_probe() -> None:
    """Few-shot: slow every batch down."""
    original = evaluation.Evaluator.batches

    def batches(evaluator: evaluation.Evaluator, index: Any) -> Any:
        for batch in original(evaluator, index):
            time.sleep(0.2)
            yield batch

    evaluation.Evaluator.batches = batches  # type: ignore[method-assign]


def poison(steps: range, factor: float = torch.nan) -> None:
    """Replace the loss of these steps by NaN or another value."""
    original = training_batches.OBJECTIVES["classification"]

    def poisoned_loss(worker: start.Worker, step: int, *args: Any) -> torch.Tensor:
        return original(worker, step, *args) * (factor if step in steps else 1.0)

    training_batches.OBJECTIVES["classification"] = poisoned_loss


def poisoned_stretch() -> None:
    """Make the losses of some steps NaN, and that of a later step a thousand times as large."""
    poison(range(12, 16))
    poison(range(35, 36), 1000.0)


def poisoned_for_ever() -> None:
    poison(range(12, 1000))


def hold_saves_until(step: int) -> None:
    """Delay the writes of a save in flight until the forward pass of the step after this one."""
    may_write = threading.Event()
    write = Saver.write

    def write_later(saver: Saver, path: Path, content: memoryview) -> None:
        # Saves that begin before or after these steps are written immediately.
        if step - 5 < saver.manifest.step <= step:
            may_write.wait()
        write(saver, path, content)

    def let_write(worker: start.Worker, at_step: int, *args: Any) -> None:
        if at_step == step:
            may_write.set()
            if worker.saver.thread is not None:
                worker.saver.thread.join()

    Saver.write = write_later  # type: ignore[method-assign]
    first_of(let_write)


def first_of(act: Callable[..., None]) -> None:
    """Call a function before the forward pass of each micro-batch."""
    original = training_batches.OBJECTIVES["classification"]

    def with_act(worker: start.Worker, step: int, *args: Any) -> torch.Tensor:
        act(worker, step, *args)
        return original(worker, step, *args)

    training_batches.OBJECTIVES["classification"] = with_act


def infinite_in_one_micro_batch(step: int) -> None:
    """Make the gradient of worker 1's first micro-batch infinite in the step after `step`."""
    original = training_batches.OBJECTIVES["classification"]
    seen = []

    def poisoned_loss(worker: start.Worker, at_step: int, *args: Any) -> torch.Tensor:
        loss = original(worker, at_step, *args)
        if at_step == step and worker.group.rank == 1 and not seen:
            seen.append(at_step)
            loss = loss * torch.inf
        return loss

    training_batches.OBJECTIVES["classification"] = poisoned_loss


def all_in_one_step(step: int) -> None:
    """In the step after `step`, make one worker's gradient infinite, request a stop only from it, and save."""

    def stop(worker: start.Worker, at_step: int, *args: Any) -> None:
        if at_step == step and worker.group.rank == 1:
            worker.stop.signal.set()

    infinite_in_one_micro_batch(step)
    hold_saves_until(step)
    first_of(stop)


def given_up_with_a_save_in_flight() -> None:
    """Delay the save of step 10 until step 15, the third of three non-finite steps."""
    poison(range(12, 15))
    hold_saves_until(14)


def bad_samples_with_a_save_in_flight() -> None:
    """Delay the save of step 10 until step 13, in which 12 samples of worker 0 are bad, two more than allowed."""

    def count_bad(health: Health, batch: Batch) -> int:
        # 6 bad samples in each of two micro-batches, more than their size: so the test needs no thousands of good ones.
        return 6 if batch.step == 12 and dist.get_rank() == 0 else 0

    Health.count_bad = count_bad  # type: ignore[method-assign]
    hold_saves_until(12)


def full_log() -> None:
    """Make writes to log.txt and metrics.jsonl fail between steps 8 and 16."""
    original = os.write

    def refuse(handle: int, blob: bytes) -> int:
        if b"step 8/" in blob or b"step 12/" in blob or b'"step": 12' in blob:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, blob)

    os.write = refuse  # type: ignore[assignment]
