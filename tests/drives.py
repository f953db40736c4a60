"""Whole runs for the fault tests, small and fast: what a driver, its workers and a fake engine do.

A module of its own, because processes import it by name. Drivers are children of a forkserver that has torch and
deepspeed already, and fork their workers, so that a run costs seconds.
"""

import ctypes
import dataclasses
import errno
import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import models
from data import storage as folder_storage
from data.decoder import Decoder
from data.errors import CheckpointError, RunOwned
from data.evaluation import EvaluationBatch, EvaluationSet
from data.loader import Batch
from data.storage import open_storage
from jobs import terminal
from jobs.cluster import agent, fork_server, worker_group
from jobs.ownership import owned
from pipeline import batches as training_batches
from pipeline import start, train
from pipeline.checkpoints import restore, stage_checkpoints
from pipeline.checkpoints import saver as saving
from pipeline.checkpoints.manifest import Manifest, committed
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.stage_checkpoints import Chosen, StageCheckpoints, WrittenFile, checkpoints_in
from pipeline.engine.engine import Engine, Fragment, ReadState
from pipeline.engine.settings import deepspeed_config
from pipeline.evaluation import features, protocols
from pipeline.evaluation import worker as evaluation
from pipeline.health import Health
from pipeline.monitoring.watchdog import STOP_FILE, node_folder
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group

RECIPE = """
cluster: {workers: 2, backend: processes, backoff_s: 0.1}
shards: {kind: pack, shard_samples: 100, sets: {train: {source: digits, split: train, image_size: 16}}}
pretrain:
  data: {train: "@shards/train"}
  model: {name: mu/8, width: 16, depth: 2, mlp: 32, heads: 2, image_size: 16, classes: 10}
  optim: {lr: 1.0e-3, schedule: {warmup_steps: 5}}
  loss: softmax
  steps: 40
  passes: null
  batch_size: 16
  micro_batch: 4
  precision: fp32
  zero: 2
  log_every: 4
  save_every: 5
"""


def fork_context() -> Any:
    """The forkserver of this process, with what a driver and its workers import."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm", "jobs.run.session"])
    return context


class ForkedServer:
    """A fork server that is a fork of the driver: a patch of the driver reaches the workers."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitpid(self.pid, 0)[1]


def launch_by_fork(
    server: fork_server.ForkServer, words: list[str], environment: dict[str, str], handles: Sequence[int]
) -> ForkedServer:
    pid = os.fork()
    if pid:
        return ForkedServer(pid)
    # The driver's ends: its death could not be seen here otherwise.
    server.connection.close()
    os.close(server.lifeline)
    os.setsid()
    os.environ.update(environment)
    fork_server.main([*words[3:6]])
    os._exit(0)


def drive(run: str, overrides: list[str], patch: str | None = None, recipe: str = RECIPE) -> None:
    """`python -m jobs run` on the small recipe; leaves the output beside the run and exits with the command's code.

    `patch` names what it is made to suffer, by a function below and perhaps its argument: "slowly -3600".
    """
    folder = Path(run).parent
    log = os.open(folder / "driver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.chdir(folder)
    # Where the tests were started by nohup they ignore it, and so would this command, as it should.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from jobs import __main__

    fork_server.ForkServer.launch = launch_by_fork  # type: ignore[method-assign, assignment]
    if patch is not None:
        name, *argument = patch.split()
        globals()[name](*(int(one) if one.lstrip("-").isdigit() else one for one in argument))
    path = folder / f"small-{os.getpid()}.yaml"  # of twenty starts, none reads what another is writing
    path.write_text(recipe)
    sys.argv = ["jobs", "run", str(path), f"run={run}", *overrides]
    code = __main__.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)


# what a driver and its workers are made to suffer; the workers are forks of the driver, so one patch reaches all


def write_durably_by(function: Callable[[Path, Any], None]) -> None:
    """Have all files of a save written by a function, the workers' and the manifest."""
    folder_storage.write_durably = function


def slow_to_delete(more: str = "") -> None:
    """An old checkpoint takes rank 0 longer to delete than the others wait for it; "deletions" has what was done."""
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
    """No checkpoint file can be written."""

    def refuse(path: Path, blob: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    write_durably_by(refuse)


def full_disk_for_a_while() -> None:
    """Steps 10 and 15 cannot be saved by worker 1, step 20 not by rank 0's manifest."""
    original = folder_storage.write_durably

    def refuse(path: Path, blob: bytes) -> None:
        step, rank = int(path.parent.name.split("-")[1]), os.environ["RANK"]
        if (step in (10, 15) and rank == "1") or (step == 20 and path.name == "MANIFEST.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, blob)

    write_durably_by(refuse)


def full_disk_at_the_end(step: int, times: int) -> None:
    """Rank 0 cannot write its file of this step so many times."""
    original, left = folder_storage.write_durably, [times]

    def refuse(path: Path, blob: bytes) -> None:
        if int(path.parent.name.split("-")[1]) == step and path.stem == "rank-00000" and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, blob)

    write_durably_by(refuse)


def fates(seed: int) -> dict[str, tuple[str, str]]:
    """What befalls five saves: (file whose write is hit, how)."""
    rng = random.Random(seed)
    files, hows = ("rank-00000", "rank-00001", "MANIFEST"), ("slow", "before", "amid", "after")
    return {f"{step:010d}": (rng.choice(files), rng.choice(hows)) for step in (5, 10, 20, 25, 35)}


def suffering_in_saves(seed: int) -> None:
    """The rank that writes the file is slow, or is killed, once: before, amid or after the write."""
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
    """A step takes 60 ms more, the driver looks every 100 ms whether to stop; and the clock is wrong."""
    now = time.time
    time.time = lambda: now() + clock_s
    worker_group.TICK_S = 0.1
    before(train, "agree", lambda *args: True, lambda: time.sleep(0.06))


def unread_terminal() -> None:
    """Steps take a while, and stdout and stderr are a pipe that is full and that nobody reads."""
    slowly()
    terminal.CLOSE_S = 0.5
    _, writer = os.pipe()  # the other end stays open as long as this process
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * size)
    os.dup2(writer, 1), os.dup2(writer, 2)


def in_no_hurry() -> None:
    """The first step waits for the file "go" beside the run."""

    def wait() -> None:
        while not Path("go").exists():
            time.sleep(0.02)

    before(train, "agree", at(1, 0, 0), wait)


def before(owner: Any, name: str, when: Callable[..., bool], act: Callable[[], Any]) -> None:
    """`act` comes first in the calls of a method or function for which `when` says so."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        if when(*args):
            act()
        return original(*args, **more)

    setattr(owner, name, wrapped)


def at(attempt: int, steps: int | None = None, rank: int | None = None) -> Callable[..., bool]:
    """Whether it is this attempt, after so many whole steps and on this rank (None: any); a worker is told first."""

    def is_there(worker: start.Worker, *args: Any) -> bool:
        whole_steps = worker.health.recent[-1].step if worker.health.recent else 0
        return worker.job.attempt == attempt and steps in (None, whole_steps) and rank in (None, worker.rank)

    return is_there


def hanging(places: str) -> None:
    """The first attempt hangs at the first of the places, the second at the second …"""
    attempts = {place: number for number, place in enumerate(places.split(","), 1)}
    before(train, "agree", at(attempts["reduce"], 11, 1), lambda: os.kill(os.getpid(), signal.SIGSTOP))
    before(start, "build_model", lambda *args: args[-1].attempt == attempts.get("build") and on_rank_1(), sleep)
    before(StageCheckpoints, "choose", lambda checkpoints, attempt, *args: attempt == attempts.get("restore"), sleep)
    before(train, "agree", at(attempts.get("collective", 0), 31), sleep)
    before(train, "hand_on", at(attempts.get("finish", 0)), sleep)
    batches, agreed = train.micro_batches, evaluation.Evaluator.together

    def micro_batches(worker: start.Worker, start_step: int) -> Any:
        for batch in batches(worker, start_step):
            if batch.step == 22 and at(attempts["data"], rank=1)(worker):
                sleep()
            yield batch

    def together(evaluator: evaluation.Evaluator, *args: Any) -> Any:
        for batch in agreed(evaluator, *args):
            if evaluator.folder.name == f"attempt-{attempts.get('evaluate', 0):06d}" and on_rank_1():
                sleep()
            yield batch

    train.micro_batches = micro_batches  # type: ignore[assignment]
    evaluation.Evaluator.together = together  # type: ignore[method-assign]


def on_rank_1() -> bool:
    return os.environ["RANK"] == "1"


def sleep() -> None:
    time.sleep(600)


def killed_amid_a_window() -> None:
    """Worker 0 of the first attempt is killed in step 18: behind the commit of step 15, amid the steps of a line."""
    before(train, "agree", at(1, 17, 0), lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped_in_an_evaluation() -> None:
    """Every batch that a worker judges adds its rank to the file "judged"; in the third, rank 0 waits for the stop."""
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


def spare_core() -> None:
    """This machine has cores that no worker uses."""
    os.sched_getaffinity = lambda pid: set(range(64))  # type: ignore[assignment]


def evaluator_dies(how: str = "SIGKILL", times: int = 1) -> None:
    """The first processes that judge a commit get this signal when they have begun; each leaves a file."""
    spare_core()

    def strike() -> None:
        struck = len(list(Path().glob("struck-*")))
        if struck < times:
            Path(f"struck-{struck}").touch()
            os.kill(os.getpid(), getattr(signal, how))

    in_commits(strike)


def slow_evaluator() -> None:
    """Whoever judges a commit waits for the file "go" beside the run, and says so in "judging"."""
    spare_core()

    def wait() -> None:
        Path("judging").touch()
        while not Path("go").exists():
            time.sleep(0.02)

    in_commits(wait)


def in_commits(act: Callable[[], None]) -> None:
    """Whoever evaluates a commit does this before the few-shot probe."""
    row = protocols.PROTOCOLS["fewshot"]

    def compute(*args: Any) -> Any:
        if not dist.is_initialized():  # the workers that train are a group
            act()
        return row.compute(*args)

    protocols.PROTOCOLS["fewshot"] = dataclasses.replace(row, compute=compute)


def no_first_batch() -> None:
    """Worker 1 waits for its first batch until there is a file "arrived" beside the run; it says so in "waiting"."""
    original = Decoder.run

    def run(decoder: Decoder, *args: Any) -> Any:
        while on_rank_1() and not Path("arrived").exists():
            Path("waiting").touch()
            time.sleep(0.02)
        return original(decoder, *args)

    Decoder.run = run  # type: ignore[method-assign]


def no_batch_behind_a_stretch() -> None:
    """Worker 1's first batch behind an excluded stretch does not come; it says so in "waiting"."""
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
    """The kernel kills (and counts, in a file that plays /proc/vmstat), torch and Python refuse, CUDA would."""
    agent.VMSTAT = vmstat = Path("vmstat").absolute()

    def killed() -> None:
        vmstat.write_text("oom_kill_disable 0\noom_kill 1\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def cuda() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    before(train, "agree", at(1, 11, 1), killed)
    before(train, "agree", at(2, 16, 0), lambda: torch.empty(1 << 50))
    before(train, "agree", at(3, 21, 1), lambda: bytearray(1 << 50))
    before(train, "agree", at(4, 26, 1), cuda)


def troubled_probe() -> None:
    """Few-shot: in the first attempt worker 1 is killed, in the second it hangs, from the third on it is slow."""
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
    """Few-shot: every batch takes a while."""
    original = evaluation.Evaluator.batches

    def batches(evaluator: evaluation.Evaluator, index: Any) -> Any:
        for batch in original(evaluator, index):
            time.sleep(0.2)
            yield batch

    evaluation.Evaluator.batches = batches  # type: ignore[method-assign]


def poison(steps: range, factor: float = torch.nan) -> None:
    """The loss of these steps is not a number, or another one."""
    original = training_batches.OBJECTIVES["classification"]

    def poisoned_loss(worker: start.Worker, step: int, *args: Any) -> torch.Tensor:
        return original(worker, step, *args) * (factor if step in steps else 1.0)

    training_batches.OBJECTIVES["classification"] = poisoned_loss


def poisoned_stretch() -> None:
    """Some steps are not numbers, and a later one has a thousand times the loss."""
    poison(range(12, 16))
    poison(range(35, 36), 1000.0)


def poisoned_for_ever() -> None:
    poison(range(12, 1000))


def hold_saves_until(step: int) -> None:
    """A save that is in flight is written no sooner than the forward pass of the step that follows this one."""
    may_write = threading.Event()
    write = Saver.write

    def write_later(saver: Saver, path: Path, content: memoryview) -> None:
        # Those that begin before the steps in question, and behind them, are written at once.
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
    """Have a worker do this before each micro-batch's forward pass."""
    original = training_batches.OBJECTIVES["classification"]

    def with_act(worker: start.Worker, step: int, *args: Any) -> torch.Tensor:
        act(worker, step, *args)
        return original(worker, step, *args)

    training_batches.OBJECTIVES["classification"] = with_act


def infinite_in_one_micro_batch(step: int) -> None:
    """The gradient of worker 1's first micro-batch of the step after `step` is infinite."""
    original = training_batches.OBJECTIVES["classification"]
    seen = []

    def poisoned_loss(worker: start.Worker, at_step: int, *args: Any) -> torch.Tensor:
        loss = original(worker, at_step, *args)
        if at_step == step and worker.rank == 1 and not seen:
            seen.append(at_step)
            loss = loss * torch.inf
        return loss

    training_batches.OBJECTIVES["classification"] = poisoned_loss


def all_in_one_step(step: int) -> None:
    """In the step after `step` one worker's gradient is infinite, it alone is told to stop, and a save is written."""

    def stop(worker: start.Worker, at_step: int, *args: Any) -> None:
        if at_step == step and worker.rank == 1:
            worker.sigterm.set()

    infinite_in_one_micro_batch(step)
    hold_saves_until(step)
    first_of(stop)


def given_up_with_a_save_in_flight() -> None:
    """The save of step 10 is written no sooner than the third of the steps 13, 14, 15, which are not finite."""
    poison(range(12, 15))
    hold_saves_until(14)


def bad_samples_with_a_save_in_flight() -> None:
    """The save of step 10 is written no sooner than step 13, in which 12 samples of worker 0 are bad: two too many."""

    def count_bad(health: Health, batch: Batch) -> int:
        # Of each of its two micro-batches 6, more than it has: that spares the test thousands of good ones.
        return 6 if batch.step == 12 and dist.get_rank() == 0 else 0

    Health.count_bad = count_bad  # type: ignore[method-assign]
    hold_saves_until(12)


def full_log() -> None:
    """log.txt and metrics.jsonl cannot be written between steps 8 and 16."""
    original = os.write

    def refuse(handle: int, blob: bytes) -> int:
        if b"step 8/" in blob or b"step 12/" in blob or b'"step": 12' in blob:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, blob)

    os.write = refuse  # type: ignore[assignment]


# ------------------------------------------------------------------------ one process plays all ranks


def known(name: str, kind: str, start: int, count: int) -> torch.Tensor:
    """Elements of a made-up state that anybody can compute: 24 random-looking bits each, exact in fp32."""
    at = torch.arange(start, start + count, dtype=torch.int64) + zlib.crc32(f"{name} {kind}".encode())
    return (at * 2654435761 % 2**24).to(torch.float32) / 2**24


class FakeEngine:
    """A rank's half (or whole) of a parameter of 96 elements, with its moments."""

    def __init__(self, rank: int, world: int, step: int) -> None:
        self.part, self.rank, self.step = 96 // world, rank, step
        self.restored: dict[str, torch.Tensor] = {}

    def fragments(self) -> Iterator[Fragment]:
        start = self.rank * self.part
        yield Fragment("w", start, {k: known("w", k, start, self.part) + self.step for k in ("master", "exp_avg")})

    def load(self, read: ReadState, updates: int) -> None:
        for kind in ("master", "exp_avg"):
            self.restored[kind] = read("w", kind, self.rank * self.part, self.part)


ALONE = SimpleNamespace(
    get_rank=lambda: 0,
    get_world_size=lambda: 1,
    broadcast_object_list=lambda values, src: None,
    all_gather_object=lambda values, mine: values.__setitem__(0, mine),
)


def start_from(folder: Path, attempt: int, say: Callable[[str], None]) -> Chosen | None:
    """What a start of one worker goes on from, after it has read all of it; None where there is nothing."""
    chosen = None
    real = restore.dist
    restore.dist = ALONE  # type: ignore[assignment]
    checkpoints = checkpoints_in(folder)
    try:
        chosen = restore.choose_together(checkpoints, attempt, say)
        if chosen is not None:
            engine = FakeEngine(0, 1, 0)
            chosen = restore.load_together(engine.load, checkpoints, chosen, attempt, say)
            for kind, state in engine.restored.items():
                assert torch.equal(state, known("w", kind, 0, 96) + chosen.manifest.step)
    finally:
        restore.dist = real
    return chosen


class Quiet:
    """Telemetry that keeps nothing."""

    def log(self, text: str) -> None:
        pass

    def report(self, kind: str, values: dict[str, Any], line: str = "") -> bool:
        return True

    def sync(self) -> None:
        pass

    def enter(self, phase: str, step: int) -> None:
        """Be the worker's phases too."""


def saver_of(checkpoints: StageCheckpoints, telemetry: Any = None, keep: int = 1000) -> Saver:
    """A Saver that says nothing, keeps everything and goes on after any failure, unless told otherwise."""
    return Saver(checkpoints, telemetry or Quiet(), Quiet(), keep=keep, keep_every=0, max_failed_saves=1000)


class WorkerGroup:
    """Savers of all ranks in one process, one after the other; `dist` stands in for torch.distributed."""

    def __init__(
        self,
        run: Path,
        attempt: int = 1,
        world: int = 2,
        telemetry: Any = None,
        keep: int = 1000,
        remote: str | None = None,
    ) -> None:
        self.run, self.attempt, self.world, self.rank = run, attempt, world, 0
        self.folder = run / "stage" / "checkpoints"
        self.checkpoints = StageCheckpoints(open_storage(run, remote), "stage")
        self.savers = [saver_of(self.checkpoints, telemetry, keep) for _ in range(world)]
        self.dist = SimpleNamespace(
            get_rank=lambda: self.rank,
            get_world_size=lambda: world,
            all_gather_object=self.gather,
            broadcast_object_list=self.tell,
        )
        self.told: list[list[str]] = []  # what lay in the folder when the other workers heard of a decision

    def checkpoints_anew(self) -> StageCheckpoints:
        """The same checkpoints, as a start sees them."""
        return StageCheckpoints(self.checkpoints.storage, "stage")

    def temporary(self, step: int) -> Path:
        """Where the files of a save are written."""
        return self.run / self.checkpoints.staged_name(manifest(step, self.attempt, self.world))

    def tell(self, values: list[Any], src: int) -> None:
        self.told.append(sorted(path.name for path in self.folder.iterdir()))

    def gather(self, results: list[WrittenFile], mine: WrittenFile) -> None:
        results[:] = [saver.result for saver in self.savers]

    def begin(self, step: int) -> None:
        saving.dist = self.dist  # type: ignore[attr-defined]
        for rank, saver in enumerate(self.savers):
            self.rank, fake = rank, FakeEngine(rank, self.world, step)
            saver.begin(fake.fragments(), manifest(step, self.attempt, self.world))
            assert saver.thread is not None
            saver.thread.join()
        self.rank = 0

    def finish(self) -> Manifest | None:
        committed = self.finish_only()
        self.savers[0].wait_for_deleting()
        return committed

    def finish_only(self) -> Manifest | None:
        """As the loop does, which goes on while old checkpoints are deleted."""
        for saver in self.savers[1:]:
            saver.thread = None
        return self.savers[0].finish(self.savers[0].manifest.step)

    def save(self, step: int) -> Manifest | None:
        self.begin(step)
        return self.finish()


def manifest(step: int, attempt: int, world: int, zero: int = 2) -> Manifest:
    return Manifest(
        step=step,
        samples_seen=step * 16,
        updates=step,
        ledger=f"{step:064x}",
        attempt=attempt,
        world=world,
        zero=zero,
        config={"seed": 0},
        key="k" * 64,
        code="c" * 64,
    )


def own(run: str, directory: str, number: int) -> None:
    """Try to own a run; the winner stays until told to go, the others leave what they were told and exit 73."""
    try:
        with owned(Path(run)):
            (Path(directory) / f"won-{os.getpid()}").touch()
            while not (Path(directory) / "go").exists():
                time.sleep(0.02)
    except RunOwned as error:
        (Path(directory) / f"lost-{number}").write_text(str(error))
        os._exit(error.exit_code)


# ------------------------------------------------------------------------ real engines


def engine(zero: int, width: int = 24, depth: int = 2) -> Engine:
    """A small model under DeepSpeed."""
    config = models.config_of("mu/8", 16, 10, width=width, depth=depth, mlp=40, heads=2)
    model = models.from_config(config, torch.Generator().manual_seed(0))
    settings = deepspeed_config(zero=zero, precision="fp32", micro_batch=2, accumulation=1, clip=1.0, user_file=None)
    return Engine(model, models.decayed(model), OptimConfig(), settings)


def save_known(task: dict[str, Any]) -> None:
    """Save the known state at every ZeRO stage of this world."""
    join_group(60)
    world = torch.distributed.get_world_size()
    for zero in task["zeros"]:
        folder = Path(task["run"]) / f"world-{world}-zero-{zero}"
        made = engine(zero, *task.get("size", ()))
        made.load(known, 7)
        saver = saver_of(checkpoints_in(folder))
        saver.begin(made.fragments(), manifest(7, 1, world, zero))
        assert saver.finish(7) is not None, saver.failure
        made.close()


def load_known(task: dict[str, Any]) -> dict[str, Any]:
    """Load every checkpoint at every ZeRO stage of this world; says what was not bit-equal."""
    join_group(60)
    wrong, elements, loads, outputs = [], set(), 0, set()
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    for zero in task["zeros"]:
        made = engine(zero)
        for folder in sorted(Path(task["run"]).glob("world-*")):
            for f in made.fragments():
                for view in f.tensors.values():
                    view.detach().fill_(torch.nan)
            checkpoints = checkpoints_in(folder)
            chosen = restore.choose_together(checkpoints, 2, print)
            assert chosen is not None
            assert restore.load_together(made.load, checkpoints, chosen, 2, print) == chosen, "none was refused"
            assert made.updates == chosen.manifest.updates == 7
            count = 0
            for f in made.fragments():
                for kind, view in f.tensors.items():
                    count += view.numel()
                    if not torch.equal(view, known(f.name, kind, f.start, view.numel())):
                        wrong.append(f"{folder.name} at ZeRO {zero}: {f.name} {kind}")
            total = torch.tensor(count)
            torch.distributed.all_reduce(total)
            elements.add(int(total))
            loads += 1
        with torch.no_grad():
            outputs.add(made.engine(images).double().sum().item())
        made.close()
    return {"wrong": wrong, "elements": sorted(elements), "loads": loads, "outputs": sorted(outputs)}


def load_damaged(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Save steps 10 and 20; then, for every case, damage step 20, and say what the group loads of what is there.

    A case is (ZeRO stage, file in which a bit is flipped); file "" stands for a node on which worker 1 reads all bytes
    wrong, though the disk has them right.
    """
    join_group(60)
    rank = torch.distributed.get_rank()
    run = Path(task["run"])
    good = run / "good"
    made = engine(2)
    saver = saver_of(checkpoints_in(good))
    for step in (10, 20):
        made.restore(lambda name, kind, start, count, step=step: known(name, kind, start, count) + step)
        saver.begin(made.fragments(), manifest(step, 1, 2))
        assert saver.finish(step) is not None, saver.failure
    made.close()

    preadv = os.preadv
    outcomes = []
    for number, (zero, file) in enumerate(task["cases"]):
        folder = run / f"case-{number}"
        if rank == 0:
            shutil.copytree(good, folder)
            if file:
                damaged = committed(folder)[0] / file
                content = bytearray(damaged.read_bytes())
                content[-5] ^= 4
                damaged.write_bytes(content)
        torch.distributed.barrier()
        if rank == 1 and not file:
            os.preadv = read_wrong  # type: ignore[assignment]
        made = engine(zero)
        said: list[str] = []
        outcome: dict[str, Any] = {"step": 0, "wrong": 0, "error": ""}
        try:
            checkpoints = checkpoints_in(folder)
            chosen = restore.choose_together(checkpoints, 2, said.append)
            assert chosen is not None
            chosen = restore.load_together(made.load, checkpoints, chosen, 2, said.append)
            outcome["step"] = chosen.manifest.step
            for f in made.fragments():
                for kind, view in f.tensors.items():
                    expected = known(f.name, kind, f.start, view.numel()) + chosen.manifest.step
                    outcome["wrong"] += int((view != expected).sum())
        except CheckpointError as error:
            outcome["error"] = str(error)
        os.preadv = preadv
        made.close()
        outcomes.append({**outcome, "said": said, "left": sorted(path.name for path in folder.iterdir())})
    everybody: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, outcomes)
    return everybody


def read_wrong(handle: int, buffers: list[memoryview], offset: int) -> int:
    """Read as os.preadv does, and flip a bit of it, as bad memory of a node does."""
    content = bytearray(os.pread(handle, len(buffers[0]), offset))
    content[0] ^= 1
    buffers[0][: len(content)] = content
    return len(content)


# ------------------------------------------------------------------------ storage that is not shared

CLONE_NEWNS = 0x20000  # man 2 unshare


def with_a_disk_of_its_own(folder: str) -> None:
    """Put this thread, and those that it starts, where another disk lies at `folder`, as on a node of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)


def save_apart(task: dict[str, Any]) -> str:
    """Save; worker 1 on a disk that rank 0 does not see. Returns why nothing was committed, "" where it was."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    run = Path(task["run"])
    stage_checkpoints.SEEN_WITHIN_S = 0.5
    if rank == 1 and task["apart"]:
        with_a_disk_of_its_own(task["run"])
    saver = saver_of(checkpoints_in(run / "stage" / "checkpoints"))
    saver.begin(FakeEngine(rank, 2, 10).fragments(), manifest(10, 1, 2))
    saver.finish(10)
    return saver.failure
