"""The checks of a cluster: the reports of nodes and workers against the requirements of the campaign.

Nothing here measures, reads or waits: the same reports have the same results (the table is in checks.py).
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from data.files import memory_text, size_text
from jobs.extras.planning.stage_checks import CheckVerdict
from pipeline.extras.preflight.folder import FolderReport
from pipeline.extras.preflight.network import PairTime
from pipeline.extras.preflight.worker import PreflightReport
from pipeline.identity import DEVICE, MUST_BE_EQUAL, SHOULD_BE_EQUAL, Identity, code_mismatch, differences, worker_name
from pipeline.process_group import SKEW_S
from pipeline.values import counted, milliseconds

LONG_SAVE_S = 60.0
SHM_WITH_GPUS = 2**30  # bytes; NCCL's manual asks for --shm-size=1g
SHM = 2**26  # bytes; what Docker gives
OPEN_FILES_A_WORKER = 8  # that a process has open for each other worker: gloo's connections, in each of its groups
OPEN_FILES = 512  # for everything else; shards take a quarter of the limit, whatever it is (data.shards.reader)
SLOW_PAIR = 3.0  # times the time of the fastest pair of its kind; on two busy cores equal pairs differ by less
SLOW_REDUCTION = 0.5  # of the time that a step computes; DeepSpeed does not hide it behind the backward pass by default
MOST_NODES = 8  # that are listed by name
SHARED_RUN = "give the run a directory on storage that every node mounts at the same path: run=/shared/NAME"


@dataclass(frozen=True)
class StageRequirements:
    """What one trained stage will ask of workers and links."""

    name: str
    gradient_bytes: int  # that are summed over the workers at once
    reductions: float  # of so many bytes in a step
    compute_s: float | None  # of a step, as `plan` assumes it of a GPU; None on CPUs, of which it assumes nothing
    memory_bytes: int | None  # a worker's states and activations, as `plan` estimates them; None: not traced
    snapshot_bytes: int  # a worker's share of a checkpoint, in host memory
    checkpoint_bytes: int  # of all workers
    disk_bytes: int  # for all checkpoints and weights to come


@dataclass(frozen=True)
class Requirements:
    """What a campaign will ask of its cluster."""

    workers: int
    gpus_per_worker: int
    code: str  # digest of the driver's
    stages: list[StageRequirements]
    sets: dict[str, float | None]  # path → bytes/s that a worker needs of it; None: not known
    is_shared: bool = True  # the run directory; not of a run in an object store
    not_made: list[str] = field(default_factory=list)  # sets that an earlier stage will make
    unused_gpus: list[str] = field(default_factory=list)  # what session.warn_of_unused_gpus says


class ClusterFacts:
    """What nodes and workers have reported, and what the campaign requires of them."""

    def __init__(self, report: PreflightReport, requirements: Requirements) -> None:
        self.workers = report["workers"]
        self.network = report["network"]
        self.requirements = requirements
        # Nodes without a worker are checked too: an attempt may move there.
        self.everywhere = [*report["workers"], *report["spares"]]
        self.identities: list[Identity] = []
        self.folders: list[tuple[Identity, FolderReport]] = []  # each node once, with its report of the run's folder
        for place in self.everywhere:
            self.identities.append(place["identity"])
            if place["folder"] is not None:
                self.folders.append((place["identity"], place["folder"]))
        self.workers_on = Counter(worker["identity"]["node"] for worker in self.workers)


def code(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check the code of workers and nodes against this command's."""
    expected = found.requirements.code
    others = code_mismatch(found.identities, expected)
    if others:
        remedy = "bring the checkout of that node up to date, or take it off its PYTHONPATH; then run this again"
        yield CheckVerdict("FAIL", others, remedy)
    elif found.identities:
        yield CheckVerdict("OK", f"{expected[:12]}, this command's, in all workers")


def versions(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check the packages of workers and nodes against those of most nodes."""
    remedy = "install there what constraints.txt pins"
    must = differences(found.identities, MUST_BE_EQUAL)
    should = differences(found.identities, SHOULD_BE_EQUAL)
    if must:
        if not any(difference.is_tie for difference in must):
            remedy += "; a run leaves such a node out, where the others are enough"
        yield CheckVerdict("FAIL", "; ".join(map(str, must)), remedy)
    elif should:
        yield CheckVerdict("WARN", "; ".join(map(str, should)), remedy)
    elif found.identities:
        packages = map(" ".join, found.identities[0]["packages"].items())
        yield CheckVerdict("OK", f"{', '.join(packages)}, in all workers")


def workers(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check which workers lie where, the first nodes by name, and on which devices."""
    identities = found.identities[: len(found.workers)]
    ranks_of: dict[str, list[str]] = {}
    for worker in identities:
        ranks_of.setdefault(worker["node"], []).append(str(worker["rank"]))
    nodes = []
    for node, ranks in list(ranks_of.items())[:MOST_NODES]:
        nodes.append(f"{node}: {','.join(ranks)}")
    if len(ranks_of) > MOST_NODES:
        nodes.append("…")
    text = f"{len(identities)} on {counted(len(ranks_of), 'node')} ({', '.join(nodes)}), "
    text += f"on {identities[0]['device']}"
    if identities[0]["driver"]:
        text += f", GPU driver {identities[0]['driver']}"
    spares = len(found.everywhere) - len(found.workers)
    if spares:
        text += f"; {counted(spares, 'spare node')} looked at too"
    other_devices = differences(identities, DEVICE)
    remedy = "expect the speed of the slowest, and other bits where an attempt lies on other devices"
    yield CheckVerdict("WARN" if other_devices else "OK", "; ".join([text, *map(str, other_devices)]), remedy)


def gpus(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that the workers have the GPUs that the recipe requests."""
    # A node's GPUs are in the report of its first worker, as its folder is.
    present = 0
    on_cpu = []
    for report in found.workers:
        if report["folder"] is not None:
            present += report["machine"]["gpus_present"]
        if report["identity"]["device"] == "cpu":
            on_cpu.append(report["identity"])
    asked = found.requirements.workers * found.requirements.gpus_per_worker
    text = f"{asked} asked for, {present} on the workers' nodes"
    if asked and on_cpu:
        remedy = "python -c 'import torch; print(torch.cuda.is_available())' there: driver, torch's CUDA build"
        yield CheckVerdict("FAIL", f"{text}; {worker_name(on_cpu[0], len(on_cpu) - 1)} computes on the CPU", remedy)
    elif found.requirements.unused_gpus:
        yield CheckVerdict("WARN", f"{text}; {found.requirements.unused_gpus[0]}")
    elif present and not asked:
        yield CheckVerdict("WARN", f"{text}: the workers compute on the CPU", "type cluster.gpus_per_worker=1")
    else:
        yield CheckVerdict("OK", text)


def all_reduce(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check how fast the workers sum."""
    network = found.network
    if network is None:
        return
    interfaces = set()
    for worker in found.workers:
        interfaces.add(worker["interface"] or "the default")
    rate = network["bytes"] / network["seconds"]
    text = (
        f"{size_text(network['bytes'])} in {milliseconds(network['seconds'])} ({size_text(round(rate))}/s), one "
        f"number in {milliseconds(network['latency_s'])}, over {', '.join(sorted(interfaces))}"
    )
    yield CheckVerdict("OK", text)


def reduction(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check what summing gradients costs a step at the rate of the all-reduce."""
    network = found.network
    if network is None:
        return
    rate = network["bytes"] / network["seconds"]
    for stage in found.requirements.stages:
        seconds = stage.reductions * (network["latency_s"] + stage.gradient_bytes / rate)
        text = (
            f"{stage.name}: {stage.reductions:g} × {size_text(stage.gradient_bytes)} of gradients, about "
            f"{milliseconds(seconds)} a step"
        )
        if stage.compute_s is None:
            yield CheckVerdict("OK", f"{text} (plan assumes no speed of CPUs to compare it with)")
            continue
        share = seconds / stage.compute_s
        text += f", {share:.0%} of the {milliseconds(stage.compute_s)} that plan assumes for computing it"
        remedy = "use the fast network for NCCL (docs/design/cluster.md); "
        remedy += "a larger batch_size or zero=1 sums less often"
        yield CheckVerdict("WARN" if share > SLOW_REDUCTION else "OK", text, remedy)


def links(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check which two workers have the slowest link, and whether it is far slower than others of its kind."""
    network = found.network
    if network is None:
        yield CheckVerdict("OK", "one worker: nothing is sent")
        return
    nodes = [worker["identity"]["node"] for worker in found.workers]  # by rank
    pairs = network["pairs"]
    which = f"all {counted(len(pairs), 'pair')} of workers"
    if not network["all_pairs"]:
        which = f"{len(pairs)} pairs (neighbours in the ring; first workers of nodes)"
    slowest = max(pairs, key=lambda pair: pair["seconds"])
    low, high = slowest["ranks"]
    text = (
        f"{which}; slowest {low}–{high} ({nodes[low]}, {nodes[high]}): {size_text(network['message_bytes'])} in "
        f"{milliseconds(slowest['seconds'])}, one number in {milliseconds(slowest['latency_s'])}"
    )
    # Between nodes a message takes another way than within a node: only those of one kind are compared.
    slow: list[set[str]] = []
    worst = 1.0
    for is_within in (True, False):
        kind: list[tuple[PairTime, set[str]]] = []
        fastest_s = math.inf
        for pair in pairs:
            first, second = pair["ranks"]
            if (nodes[first] == nodes[second]) == is_within:
                kind.append((pair, {nodes[first], nodes[second]}))
                fastest_s = min(fastest_s, pair["seconds"])
        for pair, nodes_of_pair in kind:
            ratio = pair["seconds"] / fastest_s
            if ratio > SLOW_PAIR:
                slow.append(nodes_of_pair)
                worst = max(worst, ratio)
    if not slow:
        yield CheckVerdict("OK", text)
        return
    # A node that is in all slow pairs is the one to look at.
    common = set.intersection(*slow)
    where = "these nodes'"
    if len(common) == 1:
        where = f"{min(common)}'s"
    remedy = f"look at {where} cable, switch port and routes; NCCL_SOCKET_IFNAME names another interface"
    count = f"{len(slow)} pairs are"
    if len(slow) == 1:
        count = "it is"
    yield CheckVerdict("WARN", f"{text}; {count} up to {worst:.0f} × as slow as the fastest of their kind", remedy)


def run_folder(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that the run directory is the same storage for all nodes and the driver, and does what a run requires."""
    if not found.requirements.is_shared:
        yield CheckVerdict("OK", "each node's own: the run lies in an object store")
        return
    # Whether it is the same storage; only then do locks and links of a node tell something.
    lacking = [(who, folder["lacks"]) for who, folder in found.folders if folder["lacks"]]
    unseen = [who for who, folder in found.folders if not folder["sees_driver"]]
    unanswered = [who for who, folder in found.folders if not folder["is_answered"]]
    if unseen:
        text = f"not shared: {worker_name(unseen[0])} does not see what the driver has written"
        yield CheckVerdict("FAIL", text, SHARED_RUN)
    elif unanswered:
        text = f"not shared: the driver does not see what {worker_name(unanswered[0])} has written"
        yield CheckVerdict("FAIL", text, SHARED_RUN)
    elif lacking:
        who, lacks = lacking[0]
        remedy = "docs/run-storage.md says what it must do; choose another: run=/elsewhere"
        yield CheckVerdict("FAIL", f"{worker_name(who)}: {'; '.join(lacks)}", remedy)
    else:
        text = f"the same for the driver and {counted(len(found.folders), 'node')}; links, rename, fsync work"
        yield CheckVerdict("OK", text)


def clocks(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check how far the nodes' clocks are from the driver's."""
    if not found.requirements.is_shared:
        yield CheckVerdict("OK", "not measured: that takes a folder which the driver and the nodes share")
        return
    worst_s = 0.0
    uncertainty_s = 0.0
    furthest = ""
    for who, folder in found.folders:
        if folder["skew_s"] is None or folder["uncertainty_s"] is None:
            yield CheckVerdict("WARN", f"not measured: the driver has not answered {worker_name(who)}")
            return
        if abs(folder["skew_s"]) >= abs(worst_s):
            worst_s = folder["skew_s"]
            uncertainty_s = folder["uncertainty_s"]
            furthest = worker_name(who)
    give_or_take = f"give or take {milliseconds(uncertainty_s)}"
    if abs(worst_s) - uncertainty_s > SKEW_S:
        side = "ahead of" if worst_s > 0 else "behind"
        text = f"the clock of {furthest} is {milliseconds(abs(worst_s))} {side} the driver's, {give_or_take}"
        remedy = "let NTP set the clocks: times in records and incidents of several nodes cannot be compared"
        yield CheckVerdict("WARN", text, remedy)
    else:
        yield CheckVerdict("OK", f"within {milliseconds(abs(worst_s))} of the driver's, {give_or_take}")


def disk(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check the space in the run directory against the checkpoints to come."""
    free = [folder["free_bytes"] for _, folder in found.folders if folder["written_bytes"]]
    if not free:
        yield CheckVerdict("WARN", "not measured: no node could write into the run directory")
        return
    needed = sum(stage.disk_bytes for stage in found.requirements.stages)
    text = f"{size_text(min(free))} free, {size_text(needed)} needed for the checkpoints and weights to come"
    remedy = "make room there, lower keep, or give the run another disk: run=/elsewhere"
    yield CheckVerdict("FAIL" if min(free) < needed else "OK", text, remedy)


def disk_speed(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check how fast the run directory takes files against the largest checkpoint."""
    written = [folder for _, folder in found.folders if folder["written_bytes"]]
    if not written:
        return
    # All nodes wrote at the same time: a commit waits for the last of them.
    seconds = max(folder["written_s"] for folder in written)
    rate = sum(folder["written_bytes"] for folder in written) / seconds
    largest = max((stage.checkpoint_bytes for stage in found.requirements.stages), default=0)
    text = (
        f"{size_text(round(rate))}/s written by {counted(len(written), 'node')} at once, fsync included: "
        f"a checkpoint of {size_text(largest)} takes about {largest / rate:.1f} s"
    )
    remedy = "saving goes on during training; see that save_every is longer"
    yield CheckVerdict("WARN" if largest / rate > LONG_SAVE_S else "OK", text, remedy)


def memory(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check the memory that is free against the estimates of `plan`, on the node with the least for each worker."""
    tightest = min(
        found.workers,
        key=lambda worker: worker["machine"]["memory_free"] / found.workers_on[worker["identity"]["node"]],
    )
    node = tightest["identity"]["node"]
    free = tightest["machine"]["memory_free"]
    count = found.workers_on[node]
    stages = found.requirements.stages
    needed = 0
    gpu_needed = 0
    untraced = []
    for stage in stages:
        gpu_needed = max(gpu_needed, stage.memory_bytes or 0)
        if stage.memory_bytes is None:
            untraced.append(stage.name)
        # On a GPU only the copy that a save makes lies in the host's memory.
        bytes_here = stage.snapshot_bytes
        if not found.requirements.gpus_per_worker:
            bytes_here += stage.memory_bytes or 0
        needed = max(needed, bytes_here * count)
    text = f"{memory_text(free)} free on {node} for {counted(count, 'worker')}, about {memory_text(needed)} needed"
    gpu_free = tightest["machine"]["gpu_memory_free"]
    if gpu_free is not None and free >= needed:
        text += f"; {memory_text(gpu_free)} free on its GPU, about {memory_text(gpu_needed)} needed"
    if free < needed:
        remedy = "lower micro_batch or data.processes, raise checkpoint_blocks, or add nodes"
        yield CheckVerdict("WARN", text, remedy)
    elif gpu_free is not None and gpu_free < gpu_needed:
        yield CheckVerdict("WARN", text, "lower micro_batch, or raise checkpoint_blocks or zero")
    elif untraced:
        text += f"; without the steps of {', '.join(untraced)}, which could not be traced"
        yield CheckVerdict("WARN", text, "`python -m jobs plan` says why")
    else:
        yield CheckVerdict("OK", text)


def shared_memory(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check shared memory, which NCCL needs between the workers of a node."""
    least: int | None = None
    node = ""
    for place in found.everywhere:
        free = place["machine"]["shm_free"]
        if free is not None and (least is None or free < least):
            least = free
            node = place["identity"]["node"]
    expected = SHM
    if found.requirements.gpus_per_worker:
        expected = SHM_WITH_GPUS
    if least is None:
        yield CheckVerdict("WARN", "not there, so not measured")
    elif least < expected:
        text = f"{memory_text(least)} free on {node}, expected {memory_text(expected)}"
        remedy = "a container: --shm-size=8g, or a volume of medium Memory at /dev/shm"
        yield CheckVerdict("WARN", text, remedy)
    else:
        yield CheckVerdict("OK", f"{memory_text(least)} free on {node}")


def open_files(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check the limit of open files of each node."""
    lowest = min(found.everywhere, key=lambda place: place["machine"]["open_files"])
    limit = lowest["machine"]["open_files"]
    needed = OPEN_FILES + OPEN_FILES_A_WORKER * len(found.workers)
    text = f"{limit:,} for a worker on {lowest['identity']['node']}, about {needed:,} needed"
    remedy = f"ulimit -n {4 * needed} before `ray start`, or LimitNOFILE= of its unit"
    yield CheckVerdict("WARN" if limit < needed else "OK", text, remedy)


def sets(found: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that every node can read every set, and how fast the slowest does."""
    for path, rate_needed in found.requirements.sets.items():
        rates: dict[str, float] = {}  # node → bytes/s
        for place in found.everywhere:
            reach = place["sets"].get(path)
            if reach is None:
                continue
            if reach["error"]:
                text = f"{worker_name(place['identity'])} cannot read {path}: {reach['error']}"
                remedy = (
                    "mount the same storage at the same path on every node, or give that node the store's credentials"
                )
                yield CheckVerdict("FAIL", text, remedy)
                break
            rates[place["identity"]["node"]] = reach["bytes"] / max(reach["seconds"], 1e-9)
        else:
            # The slowest node, against the bytes/s that its workers need of the set.
            slowest = min(rates, key=rates.__getitem__)
            text = f"{path}: {size_text(round(rates[slowest]))}/s read on {slowest}, the slowest of "
            text += counted(len(rates), "node")
            if rate_needed is None:
                yield CheckVerdict("OK", text)
                continue
            count = found.workers_on[slowest] or 1
            wanted = rate_needed * count
            text += f"; its {counted(count, 'worker')} take {size_text(round(wanted))}/s at the speed that plan "
            text += "assumes of GPUs"
            remedy = "this was one reader; where several are no faster: faster storage, or copy the shards to the "
            remedy += "nodes"
            yield CheckVerdict("WARN" if rates[slowest] < wanted else "OK", text, remedy)
    for path in found.requirements.not_made:
        yield CheckVerdict("OK", f"{path}: not there yet, a stage before will make it; not read")
