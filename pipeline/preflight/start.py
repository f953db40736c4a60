"""Before an attempt works: do all workers run the same code, and is the run directory the same storage for all of them?

1. Every worker looks in the run directory for the claim of this attempt, which the driver has written.
2. All workers exchange their identities, and the time on their clocks.
3. Rank 0 looks for a file of every other worker: the log of its phases.
4. A difference that makes other bits or loses a checkpoint is refused, by all workers alike; rank 0 logs the others.

    {"rank": 1, "node": "n2", "code": "3f2a…", "packages": {"torch": "2.13.0", …}, "device": "cpu", …} of every worker
    → "worker 1 on n2 has torch 2.12.0, worker 0 on n1 has 2.13.0"

It takes less than 0.1 s. `jobs preflight` makes the same comparisons, and measures what
takes longer: links, disks, storage (docs/preflight.md).
"""

import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist

from data.errors import ClusterError
from pipeline.checkpoints.shared_storage_check import SAME_STORAGE, look_for
from pipeline.preflight.machine import memory_free
from pipeline.versions import MUST_BE_EQUAL, ROOT, SHOULD_BE_EQUAL, code_version, package_versions

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DIGEST_CHARACTERS = 12  # of a digest, as people are shown it
NO_RANK = -1  # of a node that has no worker
DEVICES = ("device", "GPU driver")  # properties that `differences` compares besides packages
SKEW_S = 1.0  # of a clock; the times of several nodes stand side by side in records, incidents and the accounting


# ------------------------------------------------------------------------ identities and their differences


class Identity(TypedDict):
    """Code, packages and device of one worker, or of a node without a worker; JSON."""

    rank: int
    node: str
    root: str  # where its checkout lies
    code: str  # the digest of that
    packages: dict[str, str]
    device: str  # "cpu", or the name of the GPU
    driver: str  # version of the GPU's driver; "" without one


def identity(device: torch.device) -> Identity:
    """Return the identity of this worker."""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    driver = None
    with suppress(OSError):
        driver = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", NVIDIA_DRIVER.read_text())
    return {
        "rank": int(os.environ.get("RANK", NO_RANK)),
        "node": socket.gethostname(),
        "root": str(ROOT),
        "code": code_version(),
        "packages": package_versions(),
        "device": device_name(device),
        "driver": driver[1] if driver else "",
    }


def device_name(device: torch.device) -> str:
    """Return "cpu", or the name of the GPU, such as "NVIDIA H100 80GB HBM3"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def differences(workers: Sequence[Identity], properties: Sequence[str]) -> list[str]:
    """Return a text for each property that not all workers have alike: the first worker that differs from rank 0.

    Properties are packages, and those of `DEVICES`.
    """
    texts = []
    for name in properties:
        values = []
        for worker in workers:
            known = {**worker["packages"], "device": worker["device"], "GPU driver": worker["driver"]}
            values.append(known[name])
        others = [number for number, value in enumerate(values) if value != values[0]]
        if others:
            first_other = named(workers[others[0]], len(others) - 1)
            texts.append(
                f"{first_other} has {name} {values[others[0]] or 'none'}, {named(workers[0])} has {values[0] or 'none'}"
            )
    return texts


def other_code(workers: Sequence[Identity], code: str) -> str:
    """Name the first worker that runs other code than the driver's, `code`; "" where all run that."""
    others = [worker for worker in workers if worker["code"] != code]
    if not others:
        return ""
    first = others[0]
    return (
        f"{named(first, len(others) - 1)} runs other code than this command: "
        f"{first['code'][:DIGEST_CHARACTERS]} in {first['root']}, this command {code[:DIGEST_CHARACTERS]}"
    )


def named(worker: Identity, more: int = 0) -> str:
    """Return how a worker is called in messages: "worker 1 on n2", and " (and 3 more)" where it stands for others."""
    name = f"worker {worker['rank']} on {worker['node']}"
    if worker["rank"] == NO_RANK:
        name = f"the spare node {worker['node']}"
    if more:
        name += f" (and {more} more)"
    return name


# ------------------------------------------------------------------------ the check


@dataclass(frozen=True)
class Arrival:
    """Holds what a worker sends the others when it has come to the start."""

    identity: Identity
    clock_s: float  # since 1970, when all had come
    sees_claim: bool
    free_bytes: int = 0  # of its GPU, or of its node's memory where it computes on the CPU


def check_start(
    *,
    run: Path,
    attempt: int,
    attempt_folder: Path,
    code: str,
    claimed: float,
    device: torch.device,
    is_shared: bool,
    device_bytes: int | None = None,
    log: Callable[[str], None],
) -> None:
    """Collective: refuse a worker group that would not train as one; rank 0 logs with `log`.

    `code` is the digest of the driver's code, `claimed` when it claimed the attempt. Without `is_shared` the run
    directory is each node's own, and files of other nodes are not looked for. `device_bytes` is what a worker needs of
    its device, where that is known. Raises ClusterError, on all workers alike.
    """
    # 1. In a folder that is listed anew, and with patience, where a network file system is late.
    claim = run / "attempts" / f"{attempt:06d}.json"
    sees_claim = True
    if is_shared:
        unseen, _ = look_for(claim.parent, {claim.name: None})
        sees_claim = not unseen

    # 2. The clocks are read when all have come, so that they are read together.
    myself = identity(device)
    free_bytes = memory_free()
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    dist.barrier()
    arrival = Arrival(myself, time.time(), sees_claim, free_bytes)
    arrivals = [arrival] * dist.get_world_size()
    dist.all_gather_object(arrivals, arrival)

    # 3 and 4. Rank 0 alone sees the others' files; so it decides, and sends the others the reason of a refusal.
    refusal = [""]
    if dist.get_rank() == 0:
        try:
            refuse_unlike(arrivals, code, claim, attempt_folder, is_shared)
        except ClusterError as error:
            refusal = [str(error)]
        try:
            check_device_memory(arrivals, device_bytes or 0)
        except ClusterError as error:
            # A CPU may swap, and its free memory changes by the minute; a GPU would end the run at its first step.
            if device.type == "cuda":
                refusal[0] = refusal[0] or str(error)
            else:
                log(str(error))
        log_differences(arrivals, claimed, log)
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0]:
        raise ClusterError(refusal[0])


def check_device_memory(arrivals: Sequence[Arrival], device_bytes: int) -> None:
    """Raise ClusterError where a worker's device has fewer free bytes than a worker needs for a step."""
    computing_on_cpu: Counter[str] = Counter()
    for arrival in arrivals:
        if arrival.identity["device"] == "cpu":
            computing_on_cpu[arrival.identity["node"]] += 1
    for arrival in arrivals:
        # A GPU is one worker's, a node's memory that of all its workers.
        sharing = computing_on_cpu[arrival.identity["node"]] or 1
        if device_bytes * sharing <= arrival.free_bytes:
            continue
        free = f"{arrival.free_bytes / 2**30:.1f} GiB"
        share = f"{free} are free"
        if sharing > 1:
            share = f"{sharing} such share {free} that are free"
        way_out = "`python -m jobs plan RECIPE` says what of; lower micro_batch, or raise checkpoint_blocks or zero"
        if arrival.identity["device"] != "cpu":
            # Rounded down, because more than that is not free.
            limit_gb = math.floor(10 * arrival.free_bytes / 2**30) / 10
            way_out = (
                f"type `python -m jobs plan RECIPE cluster.gpu_memory_gb={limit_gb}`, which names the values of "
                "micro_batch, checkpoint_blocks and zero that fit"
            )
        needed = f"{device_bytes / 2**30:.1f} GiB for a step"
        raise ClusterError(f"{named(arrival.identity)} needs {needed}, and {share}\n  {way_out}")


def refuse_unlike(arrivals: Sequence[Arrival], code: str, claim: Path, attempt_folder: Path, is_shared: bool) -> None:
    """Raise ClusterError where these workers may not train together."""
    # Other code or other versions would make other bits.
    workers = [arrival.identity for arrival in arrivals]
    text = other_code(workers, code)
    if text:
        raise ClusterError(
            f"{text}\n  expected: the same checkout everywhere, unchanged since the command started\n"
            "  run the same command again; where the node has a checkout of its own on PYTHONPATH, bring it up to date"
        )
    for difference in differences(workers, MUST_BE_EQUAL):
        raise ClusterError(
            f"{difference}\n  expected: the same on all nodes\n  install there what constraints.txt pins"
        )
    if not is_shared:
        return

    # On storage of its own a worker would save a part of a checkpoint that no other worker finds.
    for arrival in arrivals:
        if not arrival.sees_claim:
            raise ClusterError(
                f"{named(arrival.identity)} does not see {claim}, which this command has written\n  {SAME_STORAGE}"
            )
    files: dict[str, Identity] = {}
    for worker in workers:
        files[f"rank-{worker['rank']:05d}.log"] = worker
    unseen, waited_s = look_for(attempt_folder, dict.fromkeys(files))
    for name in unseen:
        here = socket.gethostname()
        path = attempt_folder / name
        raise ClusterError(
            f"{named(files[name])} has written {path}, and rank 0 on {here} does not see it after {waited_s:.0f} s\n"
            f"  {SAME_STORAGE}"
        )


def log_differences(arrivals: Sequence[Arrival], claimed: float, log: Callable[[str], None]) -> None:
    """Log differences that only may do harm: smaller versions, devices, clocks."""
    workers = [arrival.identity for arrival in arrivals]
    for difference in differences(workers, (*SHOULD_BE_EQUAL, *DEVICES)):
        log(difference)
    # The worker whose clock is furthest from rank 0's.
    first = arrivals[0]
    furthest = max(arrivals, key=lambda arrival: abs(arrival.clock_s - first.clock_s))
    skew_s = furthest.clock_s - first.clock_s
    if abs(skew_s) > SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        log(
            f"the clock of {named(furthest.identity)} is {abs(skew_s):.1f} s {side} that of {named(first.identity)}: "
            "times of several nodes cannot be compared; let NTP set the clocks"
        )
    # How long the start took is not known, so only a clock that is behind the driver's can be recognised.
    behind_s = claimed - first.clock_s
    if behind_s > SKEW_S:
        log(f"the clock of {named(first.identity)} is at least {behind_s:.1f} s behind the driver's; let NTP set them")
