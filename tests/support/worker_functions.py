"""Worker functions of the cluster tests, in a separate module because workers import it by name."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.monitoring.telemetry import append_whole
from pipeline.monitoring.watchdog import STOP_FILE, Phases, node_folder
from pipeline.process_group import MallocInfo, keep_freed_memory

NAMES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "OMP_NUM_THREADS",
    "GIVEN",
]


class WantsToStop(Exception):
    exit_code = 65


def rank() -> int:
    return int(os.environ["RANK"])


def frees_at_once() -> bool:
    """Return whether malloc can reuse freed small blocks immediately: a thread's tcache would hold back seven."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # cannot be determined before glibc 2.33
        return True
    library.mallinfo2.restype = MallocInfo
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.malloc(1000) for _ in range(14)]
    before = library.mallinfo2().numbers[7]  # bytes in use
    for piece in pieces[::2]:
        library.free(piece)
    after = library.mallinfo2().numbers[7]
    for piece in pieces[1::2]:
        library.free(piece)
    return before - after > 6000


def has_compiler(config: dict[str, Any]) -> str:
    """Return whether torch's compiler was already imported, and malloc's behavior in a separate thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend([keep_freed_memory(), frees_at_once()]))
    thread.start()
    thread.join()
    return f"{'torch._dynamo' in sys.modules} {results}"


def add_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of all ranks over gloo, and the worker's task."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    environment = {name: os.environ[name] for name in NAMES}
    return {
        "sum": total.item(),
        "given": config["x"],
        "cwd": os.getcwd(),
        "threads": torch.get_num_threads(),
        "malloc": keep_freed_memory(),
        "frees_at_once": frees_at_once(),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES"),
    } | environment


def commit_until_stopped(config: dict[str, Any]) -> dict[str, Any]:
    """Commit steps on rank 0 until told to stop or finish; raise if there are more workers than configured."""
    world = int(os.environ["WORLD_SIZE"])
    if world > config["most"]:
        # The first error ends all workers, so wait for the records of slow starters.
        deadline = time.monotonic() + 60
        while len(list(Path(config["folder"]).glob("rank-*.json"))) < world and time.monotonic() < deadline:
            time.sleep(0.1)
        raise RuntimeError("this node is broken")
    step = len(list(Path(config["checkpoints"]).glob("step-*")))
    while not Path(config["finish"]).exists():
        if (node_folder(Path(config["folder"])) / STOP_FILE).exists():
            raise SystemExit(75)
        step += 1
        if rank() == 0:
            (Path(config["checkpoints"]) / f"step-{step:010d}").mkdir(parents=True)
        time.sleep(0.5)
    return {"step": step}


def wait_for_peers(config: dict[str, Any]) -> None:
    """Run the configured action on one rank while the others wait for it in a collective."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if rank() == config["rank"]:
        misbehave(config["act"])
    dist.barrier()


def misbehave(act: str) -> None:
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "crash":
        ctypes.string_at(0)  # reads address zero
    if act == "raise":
        raise ZeroDivisionError("the third batch was empty")
    if act == "stop":
        raise WantsToStop("shard 7 is short")
    if act == "exit":
        raise SystemExit(75)
    if act == "hang":
        time.sleep(600)


def sleep_until_told(config: dict[str, Any]) -> str:
    """Wait for a stop file, as a training run does."""
    Path(config["ready"]).touch()
    while not Path(config["stop"]).exists():
        time.sleep(0.05)
    return "stopped"


def meet_and_wait(config: dict[str, Any]) -> None:
    """Join the process group, announce it, and stay until told to leave."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    Path(config["ready"] + str(rank())).touch()
    while not Path(config["stop"]).exists():
        time.sleep(0.05)


def meet_and_reduce(config: dict[str, Any]) -> None:
    """Like `meet_and_wait`, but always in a collective, so that workers notice a lost peer."""
    meet_and_wait({**config, "stop": config["ready"] + str(rank())})
    while not Path(config["stop"]).exists():
        dist.all_reduce(torch.ones(1000))


def step_for_ever(config: dict[str, Any]) -> None:
    """Enter the phases of a step repeatedly, with all workers together, and report them."""
    phases = Phases(Path(config["folder"]), rank(), 600)
    dist.init_process_group("gloo")
    step = 0
    while True:
        phases.enter("data", step)
        time.sleep(0.02)
        phases.enter("reduce", step)
        dist.all_reduce(torch.ones(1))
        Path(config["ready"] + str(rank())).touch()
        step += 1


def step_until_told(config: dict[str, Any]) -> dict[str, Any]:
    """Take steps together until told to finish; report each step and the last one."""
    phases = Phases(Path(config["folder"]), rank(), 600)
    dist.init_process_group("gloo")
    finishing = torch.zeros(1)
    step = 0
    while not finishing.item():
        phases.enter("data", step)
        time.sleep(0.05)
        phases.enter("reduce", step)
        finishing[0] = float(rank() == 0 and Path(config["finish"]).exists())
        dist.all_reduce(finishing)
        Path(config["ready"] + str(rank())).touch()
        step += 1
    phases.close()
    dist.destroy_process_group()
    Path(config["ended"] + str(rank())).touch()
    time.sleep(config["lingers_s"])
    return {"step": step}


def return_a_path(config: dict[str, Any]) -> Path:
    return Path("no JSON")


class Holder:
    """An actor that only occupies its resources."""

    def ready(self) -> bool:
        return True


def work_apart(config: dict[str, Any]) -> str:
    """Take steps until told to stop, with logs and phase files in folders invisible to other nodes."""
    folder = Path(config["folder"])
    phases = Phases(folder, rank(), 600)
    dist.init_process_group("gloo")
    stopping = torch.zeros(1)
    step = 0
    while not stopping.item():
        phases.enter("data", step)
        append_whole(folder.parents[1] / "log.txt", f"worker {rank()} at {step}\n".encode())
        time.sleep(0.1)
        step += 1
        # As in training, rank 0 checks for the stop file and informs all.
        stopping[0] = float(rank() == 0 and (node_folder(folder) / STOP_FILE).exists())
        dist.all_reduce(stopping)
    if rank() == config["rank"]:
        misbehave(config["act"])
    phases.close()
    return f"worker {rank()} stopped"
