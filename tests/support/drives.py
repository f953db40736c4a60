"""Small, fast complete runs for the fault tests: start a driver, inject a fault, and read the files of the run.

    process = start(run, "pretrain.log_every=1", patch="slowly")      # `python -m jobs run` in a separate process
    at_step(run, process, 6, process.kill)
    assert finish(run) == 0, output_of(run)
    assert_same(run, twin)                                            # bit for bit the undisturbed run

This is a separate module because processes import it by name. Drivers are children of a forkserver that has already
imported torch and deepspeed, and they fork their workers, so that a run takes only seconds.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from data.errors import RunOwned
from data.storage import Folder
from jobs.cluster import fork_server
from jobs.ownership import Lease
from pipeline.checkpoints import reader as checkpoint_reader
from pipeline.checkpoints.manifest import committed
from pipeline.monitoring.telemetry import read_metrics
from tests.support import run_faults
from tests.support.demo import step_losses
from tests.support.recipes import SMALL


def fork_process(function: Callable[..., None], *arguments: object) -> Any:
    """Return an unstarted process that calls the function in a fork of a process with all imports done.

    It ends as soon as the process that started it is gone, however that ended.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm", "jobs.run.session"])
    return context.Process(target=call_while_parent_lives, args=(function, arguments))


def call_while_parent_lives(function: Callable[..., None], arguments: Sequence[object]) -> None:
    """Call the function; exit at once if the parent process ends.

    A child keeps the forkserver alive: a killed pytest would leave both running until the campaign ends. The workers
    end with their driver, whose end closes the lifeline of their fork server.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by `fork_process`"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    function(*arguments)


class ForkedServer:
    """A fork server forked from the driver, so that patches of the driver also apply in the workers."""

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


def drive(run: str, overrides: list[str], patch: str | None = None, recipe: str = SMALL) -> None:
    """Run `python -m jobs run` on the small recipe, with its output in a file next to the run; exit with its code.

    `patch` is the fault to inject: the name of a function of `run_faults`, optionally with its argument, as in
    "slowly -3600".
    """
    folder = Path(run).parent
    log = os.open(folder / "driver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.chdir(folder)
    # Tests started by nohup ignore SIGHUP, and this command would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from jobs import __main__

    fork_server.ForkServer.launch = launch_by_fork  # type: ignore[method-assign, assignment]
    if patch is not None:
        name, *argument = patch.split()
        getattr(run_faults, name)(*(int(one) if one.lstrip("-").isdigit() else one for one in argument))
    path = folder / f"small-{os.getpid()}.yaml"  # no two of twenty starts share an output file
    path.write_text(recipe)
    sys.argv = ["jobs", "run", str(path), f"run={run}", *overrides]
    code = __main__.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)


def own(run: str, directory: str, number: int) -> None:
    """Try to own a run: the winner stays until told to exit; the others write the error they got and exit with 73."""
    try:
        with Lease(Folder(Path(run)), print):
            (Path(directory) / f"won-{os.getpid()}").touch()
            while not (Path(directory) / "go").exists():
                time.sleep(0.02)
    except RunOwned as error:
        (Path(directory) / f"lost-{number}").write_text(str(error))
        os._exit(error.exit_code)


# ------------------------------------------------------------------------ a run, and what it leaves


def start(run: Path, *overrides: str, patch: str | None = None, recipe: str = SMALL) -> Any:
    """Start a run in a separate process, and return the process."""
    process = fork_process(drive, str(run), list(overrides), patch, recipe)
    process.start()
    return process


def finish(run: Path, *overrides: str, patch: str | None = None, recipe: str = SMALL) -> int:
    """Start a run, wait for its end and return the exit code."""
    process = start(run, *overrides, patch=patch, recipe=recipe)
    process.join()
    return process.exitcode


def stop_at(run: Path, step: int, *overrides: str, patch: str | None = None) -> int:
    """Start a run, send SIGTERM after it reports a step, and return its exit code."""
    process = start(run, *overrides, patch=patch)
    at_step(run, process, step, lambda: os.kill(process.pid, signal.SIGTERM))
    process.join(timeout=120)
    process.kill()  # if it did not react to the signal; an earlier exit code stays
    process.join()
    return process.exitcode


def stage(run: Path) -> Path:
    """Return the folder of the run's pretraining stage."""
    (found,) = run.glob("pretrain-*")
    return found


def forget(run: Path) -> None:
    """Delete the run's training results, but not its shards."""
    for folder in run.glob("pretrain-*"):
        shutil.rmtree(folder)


def output_of(run: Path) -> str:
    """Return the output of all drivers of the run."""
    log = run.parent / "driver.log"
    return log.read_text() if log.exists() else ""


def assert_same(run: Path, twin: Path) -> None:
    """Assert that the run has reached step 40 bit for bit like its twin (see `assert_same_stage`)."""
    assert_same_stage(stage(run), stage(twin))
    assert step_losses(stage(twin)).keys() == set(range(1, 41))


def assert_same_stage(folder: Path, twin: Path) -> None:
    """Assert that the last checkpoint's weights, moments and ledger, and all losses, equal the twin's bit for bit.

    Every evaluation of the twin must have the same value here, or a record of the reason why it is missing.
    """
    ours, theirs = (checkpoint_reader.verify(committed(each / "checkpoints")[0]) for each in (folder, twin))
    assert (ours.step, ours.ledger, ours.files) == (theirs.step, theirs.ledger, theirs.files)
    assert (folder / "weights.safetensors").read_bytes() == (twin / "weights.safetensors").read_bytes()
    reference = step_losses(twin)
    wrong = {step: values for step, values in step_losses(folder).items() if set(values) != set(reference[step])}
    assert not wrong, wrong
    ours, theirs = evaluations(folder), evaluations(twin)
    for step, values in theirs.items():
        assert values[0] is not None, f"step {step} of the twin has no value"
        assert step in ours, f"step {step} was not evaluated, and nothing says so"
        assert all(value in (None, values[0]) for value in ours[step]), (step, ours[step], values)


def evaluations(folder: Path) -> dict[int, list[dict[str, float] | None]]:
    """Return the results of all evaluations of a stage by step; None if an evaluation failed or was skipped."""
    outcomes: dict[int, list[dict[str, float] | None]] = {}
    for record in read_metrics(folder, None):
        if record["kind"] in ("evaluate_failed", "evaluate_skipped"):
            outcomes.setdefault(record["step"], []).append(None)
        elif record["kind"] == "evaluate":
            # The place and duration of an evaluation are not compared.
            about = {"kind", "time", "attempt", "step", "where", "node", "seconds"}
            values = {name: value for name, value in record.items() if name not in about}
            outcomes.setdefault(record["step"], []).append(values)
    return outcomes


def at_step(run: Path, process: Any, step: int, then: Callable[[], None]) -> None:
    """Call `then` when the started run reports the step, unless it ends before."""
    before = len(reports(run))
    while process.is_alive():
        if any(record["step"] >= step for record in reports(run)[before:]):
            return then()
        time.sleep(0.005)


def reports(run: Path) -> list[dict[str, Any]]:
    return [record for folder in run.glob("pretrain-*") for record in read_metrics(folder)]


def worker_log(run: Path, rank: int) -> str:
    """Return the log of a rank of the newest attempt."""
    return (max(run.glob("pretrain-*/attempts/attempt-*")) / f"rank-{rank:05d}.log").read_text()


def worker_pid(run: Path, rank: int) -> int:
    """Return the pid of a rank in the newest attempt."""
    newest = max(run.glob("pretrain-*/attempts/attempt-*"))
    return json.loads((newest / f"rank-{rank:05d}.json").read_text())["pid"]


def phase_of(run: Path, rank: int, attempt: int = 1) -> str:
    """Return the phase that a rank last wrote to the status file that its process shares with its agent."""
    for record in run.glob(f"*/attempts/attempt-{attempt:06d}/rank-{rank:05d}.json"):
        with suppress(OSError, ValueError):
            for handle in Path(f"/proc/{json.loads(record.read_text())['pid']}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(handle).endswith(".phase"):
                        return handle.read_text()
    return ""


def incidents(folder: Path) -> list[str]:
    """Return the first line of each incident of a stage, without date and attempt."""
    text = (folder / "incidents.txt").read_text()
    return re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d attempt \d+: (worker .*)", text, re.MULTILINE)
