"""Check a cluster: compare the nodes' and workers' reports with the campaign's requirements.

These functions neither measure nor wait, so equal reports give equal results. The table of checks is in checks.py.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from data.files import memory_text, size_text
from jobs.extras.planning.stage_checks import CheckVerdict, milliseconds
from pipeline.extras.preflight.folder import FolderReport
from pipeline.extras.preflight.network import PairTime
from pipeline.extras.preflight.worker import PreflightReport
from pipeline.identity import DEVICE, MUST_BE_EQUAL, SHOULD_BE_EQUAL, Identity, code_mismatch, differences, worker_name
from pipeline.process_group import SKEW_S
from pipeline.values import counted

LONG_SAVE_S = 60.0
SHM_WITH_GPUS = 2**30  # bytes; NCCL's manual recommends --shm-size=1g
SHM = 2**26  # bytes; Docker's default
OPEN_FILES_PER_WORKER = 8  # open files per other worker: gloo's connections in each process group
OPEN_FILES = 512  # open files for everything else; shards use a quarter of any limit (data.reader)
SLOW_PAIR = 3.0  # slowness relative to the fastest pair of the same kind; on two busy cores, equal pairs differ by less
SLOW_REDUCTION = 0.5  # share of a step's compute time; by default DeepSpeed does not overlap it with the backward pass
MAX_NODES_LISTED = 8  # maximum number of nodes listed by name
SHARED_RUN = "put the run directory on storage that every node mounts at the same path: run=/shared/NAME"


@dataclass(frozen=True)
class StageRequirements:
    """A training stage's requirements for workers, links and disk."""

    name: str
    gradient_bytes: int  # bytes in one reduction over all workers
    reductions: float  # number of reductions of gradient_bytes per step
    compute_s: float | None  # compute time of a step, assumed by `plan` for GPUs; None on CPUs
    memory_bytes: int | None  # states and activations of a worker, estimated as in `plan`; None: unknown
    snapshot_bytes: int  # a worker's share of a checkpoint, in host memory
    checkpoint_bytes: int  # size of a checkpoint of all workers
    disk_bytes: int  # disk space for all future checkpoints and weights


@dataclass(frozen=True)
class Requirements:
    """A campaign's requirements for its cluster."""

    workers: int
    gpus_per_worker: int
    code: str  # digest of the driver's code
    stages: list[StageRequirements]
    sets: dict[str, float | None]  # path of a data set → bytes/s that each worker reads; None: unknown
    is_shared: bool = True  # whether nodes share the run directory; False for runs in an object store
    not_made: list[str] = field(default_factory=list)  # data sets that an earlier stage will create
    unused_gpus: list[str] = field(default_factory=list)  # warnings of nodes.warn_of_unused_gpus


class ClusterFacts:
    """The nodes' and workers' reports, and the campaign's requirements."""

    def __init__(self, report: PreflightReport, requirements: Requirements) -> None:
        self.workers = report["workers"]
        self.network = report["network"]
        self.requirements = requirements
        # Also check nodes without a worker, because a later attempt may run there.
        self.everywhere = [*report["workers"], *report["spares"]]
        self.identities: list[Identity] = []
        self.folders: list[tuple[Identity, FolderReport]] = []  # one per node, with its report of the run directory
        for place in self.everywhere:
            self.identities.append(place["identity"])
            if place["folder"] is not None:
                self.folders.append((place["identity"], place["folder"]))
        self.workers_on = Counter(worker["identity"]["node"] for worker in self.workers)


def code(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that all workers and nodes have the same code as this command."""
    expected = facts.requirements.code
    others = code_mismatch(facts.identities, expected)
    if others:
        remedy = (
            "update the checkout on that node, or remove it from that node's PYTHONPATH; then run the command again"
        )
        yield CheckVerdict("FAIL", others, remedy)
    elif facts.identities:
        yield CheckVerdict("OK", f"{expected[:12]} on all workers, as in this command")


def versions(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that all workers and nodes have the same package versions as the majority."""
    remedy = "install the versions in constraints.txt on that node"
    must = differences(facts.identities, MUST_BE_EQUAL)
    should = differences(facts.identities, SHOULD_BE_EQUAL)
    if must:
        if not any(difference.is_tie for difference in must):
            remedy += "; a run excludes the node if the others have enough room"
        yield CheckVerdict("FAIL", "; ".join(map(str, must)), remedy)
    elif should:
        yield CheckVerdict("WARN", "; ".join(map(str, should)), remedy)
    elif facts.identities:
        packages = map(" ".join, facts.identities[0]["packages"].items())
        yield CheckVerdict("OK", f"{', '.join(packages)} on all workers")


def workers(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """List the workers and devices of each node; warn about mixed devices."""
    identities = facts.identities[: len(facts.workers)]
    ranks_of: dict[str, list[str]] = {}
    for worker in identities:
        ranks_of.setdefault(worker["node"], []).append(str(worker["rank"]))
    nodes = []
    for node, ranks in list(ranks_of.items())[:MAX_NODES_LISTED]:
        nodes.append(f"{node}: {','.join(ranks)}")
    if len(ranks_of) > MAX_NODES_LISTED:
        nodes.append("…")
    text = f"{len(identities)} on {counted(len(ranks_of), 'node')} ({', '.join(nodes)}), "
    text += f"on {identities[0]['device']}"
    if identities[0]["driver"]:
        text += f", GPU driver {identities[0]['driver']}"
    spares = len(facts.everywhere) - len(facts.workers)
    if spares:
        text += f"; {counted(spares, 'spare node')} checked too"
    other_devices = differences(identities, DEVICE)
    remedy = "training runs at the speed of the slowest device, and results may differ between devices"
    yield CheckVerdict("WARN" if other_devices else "OK", "; ".join([text, *map(str, other_devices)]), remedy)


def gpus(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that the workers have the GPUs that the recipe requests."""
    # The first worker of a node reports the node's GPUs and its folder.
    present = 0
    on_cpu = []
    for report in facts.workers:
        if report["folder"] is not None:
            present += report["machine"]["gpus_present"]
        if report["identity"]["device"] == "cpu":
            on_cpu.append(report["identity"])
    requested = facts.requirements.workers * facts.requirements.gpus_per_worker
    text = f"{requested} requested, {present} on the workers' nodes"
    if requested and on_cpu:
        remedy = (
            "check the driver and torch's CUDA build on that node: "
            "python -c 'import torch; print(torch.cuda.is_available())'"
        )
        name = worker_name(on_cpu[0], len(on_cpu) - 1)
        yield CheckVerdict("FAIL", f"{text}; without a GPU: {name}", remedy)
    elif facts.requirements.unused_gpus:
        yield CheckVerdict("WARN", f"{text}; {facts.requirements.unused_gpus[0]}")
    elif present and not requested:
        yield CheckVerdict("WARN", f"{text}: the workers compute on the CPU", "set cluster.gpus_per_worker=1")
    else:
        yield CheckVerdict("OK", text)


def all_reduce(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Report the speed of an all-reduce across all workers."""
    network = facts.network
    if network is None:
        return
    interfaces = set()
    for worker in facts.workers:
        interfaces.add(worker["interface"] or "the default")
    rate = network["bytes"] / network["seconds"]
    text = (
        f"{size_text(network['bytes'])} in {milliseconds(network['seconds'])} ({size_text(round(rate))}/s), latency "
        f"{milliseconds(network['latency_s'])}, over {', '.join(sorted(interfaces))}"
    )
    yield CheckVerdict("OK", text)


def reduction(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Estimate the time per step spent on reducing gradients, from the measured all-reduce speed."""
    network = facts.network
    if network is None:
        return
    rate = network["bytes"] / network["seconds"]
    for stage in facts.requirements.stages:
        seconds = stage.reductions * (network["latency_s"] + stage.gradient_bytes / rate)
        text = (
            f"{stage.name}: {stage.reductions:g} × {size_text(stage.gradient_bytes)} of gradients, about "
            f"{milliseconds(seconds)} per step"
        )
        if stage.compute_s is None:
            yield CheckVerdict("OK", f"{text} (not compared with compute time, which is unknown for CPUs)")
            continue
        share = seconds / stage.compute_s
        text += f", {share:.0%} of the step's compute time of {milliseconds(stage.compute_s)} assumed by plan"
        remedy = "use the fast network for NCCL (docs/design/cluster.md); "
        remedy += "or reduce gradients less often, with a larger batch_size or zero=1"
        yield CheckVerdict("WARN" if share > SLOW_REDUCTION else "OK", text, remedy)


def links(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Find the pair of workers with the slowest link; warn if it is much slower than other links of the same kind."""
    network = facts.network
    if network is None:
        yield CheckVerdict("OK", "not measured, because there is only one worker")
        return
    nodes = [worker["identity"]["node"] for worker in facts.workers]  # by rank
    pairs = network["pairs"]
    which = f"all {counted(len(pairs), 'pair')} of workers"
    if not network["all_pairs"]:
        which = f"{len(pairs)} pairs (neighbours in the ring, and first workers of nodes)"
    slowest = max(pairs, key=lambda pair: pair["seconds"])
    low, high = slowest["ranks"]
    text = (
        f"{which}; slowest {low}–{high} ({nodes[low]}, {nodes[high]}): {size_text(network['message_bytes'])} in "
        f"{milliseconds(slowest['seconds'])}, latency {milliseconds(slowest['latency_s'])}"
    )
    # Compare pairs within a node and pairs between nodes separately, because their messages take different routes.
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
    # If all slow pairs share one node, the problem is probably there.
    common = set.intersection(*slow)
    where = "these nodes'"
    if len(common) == 1:
        where = f"{min(common)}'s"
    remedy = f"check {where} cable, switch port and routes; NCCL_SOCKET_IFNAME selects another interface"
    count = f"{len(slow)} pairs are up to"
    if len(slow) == 1:
        count = "it is"
    yield CheckVerdict("WARN", f"{text}; {count} {worst:.0f} × as slow as the fastest pair of the same kind", remedy)


def run_folder(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that driver and nodes share the run directory, on storage that supports the required operations."""
    if not facts.requirements.is_shared:
        yield CheckVerdict("OK", "separate on each node, because the run is in an object store")
        return
    # First check that the storage is shared, because the results for locks and links depend on that.
    lacking = [(who, folder["lacks"]) for who, folder in facts.folders if folder["lacks"]]
    unseen = [who for who, folder in facts.folders if not folder["sees_driver"]]
    unseen_nodes = [who for who, folder in facts.folders if not folder["is_answered"]]
    if unseen:
        text = f"not shared: {worker_name(unseen[0])} does not see the driver's files"
        yield CheckVerdict("FAIL", text, SHARED_RUN)
    elif unseen_nodes:
        text = f"not shared: the driver does not see the files of {worker_name(unseen_nodes[0])}"
        yield CheckVerdict("FAIL", text, SHARED_RUN)
    elif lacking:
        who, lacks = lacking[0]
        remedy = "see the requirements in docs/run-storage.md, and use another directory: run=/elsewhere"
        yield CheckVerdict("FAIL", f"{worker_name(who)}: {'; '.join(lacks)}", remedy)
    else:
        text = f"the same on the driver and {counted(len(facts.folders), 'node')}; links, rename and fsync work"
        yield CheckVerdict("OK", text)


def clocks(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Compare the nodes' clocks with the driver's."""
    if not facts.requirements.is_shared:
        yield CheckVerdict("OK", "not measured, because the driver and the nodes do not share a folder")
        return
    worst_s = 0.0
    uncertainty_s = 0.0
    furthest = ""
    for who, folder in facts.folders:
        if folder["skew_s"] is None or folder["uncertainty_s"] is None:
            yield CheckVerdict("WARN", f"not measured, because {worker_name(who)} got no response from the driver")
            return
        if abs(folder["skew_s"]) >= abs(worst_s):
            worst_s = folder["skew_s"]
            uncertainty_s = folder["uncertainty_s"]
            furthest = worker_name(who)
    give_or_take = f"± {milliseconds(uncertainty_s)}"
    if abs(worst_s) - uncertainty_s > SKEW_S:
        side = "ahead of" if worst_s > 0 else "behind"
        text = f"the clock of {furthest} is {milliseconds(abs(worst_s))} {side} the driver's, {give_or_take}"
        remedy = "synchronise the clocks with NTP, so that times in the records of different nodes are comparable"
        yield CheckVerdict("WARN", text, remedy)
    else:
        yield CheckVerdict("OK", f"within {milliseconds(abs(worst_s))} of the driver's, {give_or_take}")


def disk(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Compare the free disk space in the run directory with the size of future checkpoints."""
    free = [folder["free_bytes"] for _, folder in facts.folders if folder["written_bytes"]]
    if not free:
        yield CheckVerdict("WARN", "not measured, because no node could write to the run directory")
        return
    needed = sum(stage.disk_bytes for stage in facts.requirements.stages)
    text = f"{size_text(min(free))} free, {size_text(needed)} needed for future checkpoints and weights"
    remedy = "free some space, decrease keep, or put the run on another disk: run=/elsewhere"
    yield CheckVerdict("FAIL" if min(free) < needed else "OK", text, remedy)


def disk_speed(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Estimate the time to write the largest checkpoint, from the measured write speed of the run directory."""
    written = [folder for _, folder in facts.folders if folder["written_bytes"]]
    if not written:
        return
    # All nodes wrote at the same time, and a commit waits for the slowest.
    seconds = max(folder["written_s"] for folder in written)
    rate = sum(folder["written_bytes"] for folder in written) / seconds
    largest = max((stage.checkpoint_bytes for stage in facts.requirements.stages), default=0)
    text = (
        f"{size_text(round(rate))}/s written by {counted(len(written), 'node')} in parallel, including fsync: "
        f"a checkpoint of {size_text(largest)} takes about {largest / rate:.1f} s"
    )
    remedy = "set save_every to an interval longer than a save, which runs during training"
    yield CheckVerdict("WARN" if largest / rate > LONG_SAVE_S else "OK", text, remedy)


def memory(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Compare free memory with `plan`'s estimates, on the node with the least memory per worker."""
    tightest = min(
        facts.workers,
        key=lambda worker: worker["machine"]["memory_free"] / facts.workers_on[worker["identity"]["node"]],
    )
    node = tightest["identity"]["node"]
    free = tightest["machine"]["memory_free"]
    count = facts.workers_on[node]
    stages = facts.requirements.stages
    needed = 0
    gpu_needed = 0
    untraced = []
    for stage in stages:
        gpu_needed = max(gpu_needed, stage.memory_bytes or 0)
        if stage.memory_bytes is None:
            untraced.append(stage.name)
        # With GPUs, host memory holds only the snapshot being saved.
        bytes_here = stage.snapshot_bytes
        if not facts.requirements.gpus_per_worker:
            bytes_here += stage.memory_bytes or 0
        needed = max(needed, bytes_here * count)
    text = f"{memory_text(free)} free on {node} for {counted(count, 'worker')}, about {memory_text(needed)} needed"
    gpu_free = tightest["machine"]["gpu_memory_free"]
    if gpu_free is not None and free >= needed:
        text += f"; {memory_text(gpu_free)} free on its GPU, about {memory_text(gpu_needed)} needed"
    if free < needed:
        remedy = "decrease micro_batch or data.processes, increase checkpoint_blocks, or add nodes"
        yield CheckVerdict("WARN", text, remedy)
    elif gpu_free is not None and gpu_free < gpu_needed:
        yield CheckVerdict("WARN", text, "decrease micro_batch, or increase checkpoint_blocks or zero")
    elif untraced:
        text += f"; not included: {', '.join(untraced)}, whose steps could not be traced"
        yield CheckVerdict("WARN", text, "for the reason, run python -m jobs plan RECIPE")
    else:
        yield CheckVerdict("OK", text)


def shared_memory(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check /dev/shm, which NCCL needs for communication within a node."""
    least: int | None = None
    node = ""
    for place in facts.everywhere:
        free = place["machine"]["shm_free"]
        if free is not None and (least is None or free < least):
            least = free
            node = place["identity"]["node"]
    expected = SHM
    if facts.requirements.gpus_per_worker:
        expected = SHM_WITH_GPUS
    if least is None:
        yield CheckVerdict("WARN", "not measured, because /dev/shm does not exist")
    elif least < expected:
        text = f"{memory_text(least)} free on {node}, expected {memory_text(expected)}"
        remedy = "in a container, use --shm-size=8g, or mount a volume of medium Memory at /dev/shm"
        yield CheckVerdict("WARN", text, remedy)
    else:
        yield CheckVerdict("OK", f"{memory_text(least)} free on {node}")


def open_files(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check the open-file limit of each node."""
    lowest = min(facts.everywhere, key=lambda place: place["machine"]["open_files"])
    limit = lowest["machine"]["open_files"]
    needed = OPEN_FILES + OPEN_FILES_PER_WORKER * len(facts.workers)
    text = f"limit {limit:,} for a worker on {lowest['identity']['node']}, about {needed:,} needed"
    remedy = f"run ulimit -n {4 * needed} before ray start, or set LimitNOFILE= in its systemd unit"
    yield CheckVerdict("WARN" if limit < needed else "OK", text, remedy)


def sets(facts: ClusterFacts) -> Iterator[CheckVerdict]:
    """Check that every node can read every data set, and that reading is fast enough."""
    for path, rate_needed in facts.requirements.sets.items():
        rates: dict[str, float] = {}  # node → bytes/s
        for place in facts.everywhere:
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
            # Compare the slowest node with the rate that its workers need.
            slowest = min(rates, key=rates.__getitem__)
            text = f"{path}: {size_text(round(rates[slowest]))}/s on {slowest}, the slowest of "
            text += counted(len(rates), "node")
            if rate_needed is None:
                yield CheckVerdict("OK", text)
                continue
            count = facts.workers_on[slowest] or 1
            wanted = rate_needed * count
            text += (
                f"; needed by its {counted(count, 'worker')}: {size_text(round(wanted))}/s at the GPU speed assumed "
            )
            text += "by plan"
            remedy = "this was measured with one reader; if several readers are not faster, use faster storage or copy "
            remedy += "the shards to the nodes"
            yield CheckVerdict("WARN" if rates[slowest] < wanted else "OK", text, remedy)
    for path in facts.requirements.not_made:
        yield CheckVerdict("OK", f"{path}: not checked, because an earlier stage will create it")
