"""The checks of a preflight: the reports of nodes and workers against the requirements of the campaign.

In:  a PreflightReport (pipeline/extras/preflight/worker.py), and the campaign's Requirements
Out: OK   clocks      within 3 ms of the driver's, give or take 4 ms
     WARN links       all 3 pairs of workers; slowest 0–2 (h0, h2): 1.0 MB in 412.0 ms, 38 × the fastest between nodes
          → look at h2's cable, switch port and routes; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME name another interface

Nothing here measures, reads or waits: the same reports have the same results.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from data.errors import ExitCode
from data.files import memory_text, size_text
from jobs.resolved_recipe import CheckResult
from pipeline.extras.preflight.folder import FolderReport
from pipeline.extras.preflight.network import PairTime
from pipeline.extras.preflight.worker import PreflightReport
from pipeline.identity import DEVICE, MUST_BE_EQUAL, SHOULD_BE_EQUAL, Identity, differences, named, other_code
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


def check_report(report: PreflightReport, requirements: Requirements) -> list[CheckResult]:
    """Compare everything that was reported with what is asked; the most important comes first."""
    checks = ReportChecks(report, requirements)
    checks.check_group()
    checks.check_links()
    checks.check_folder()
    checks.check_disk()
    checks.check_memory()
    checks.check_limits()
    checks.check_sets()
    return checks.results


def check_identities(identities: Sequence[Identity], code: str) -> list[CheckResult]:
    """Check the code of workers and nodes against this command's, and their packages against those of most nodes."""
    if not identities:
        return []
    results = []
    others = other_code(identities, code)
    if others:
        remedy = "bring the checkout of that node up to date, or take it off its PYTHONPATH; then run this again"
        results.append(CheckResult("FAIL", "code", others, remedy, ExitCode.UNAVAILABLE))
    else:
        results.append(CheckResult("OK", "code", f"{code[:12]}, this command's, in all workers"))

    remedy = "install there what constraints.txt pins"
    must = differences(identities, MUST_BE_EQUAL)
    should = differences(identities, SHOULD_BE_EQUAL)
    if must:
        text = "; ".join(map(str, must))
        if not any(difference.is_tie for difference in must):
            remedy += "; a run leaves such a node out, where the others are enough"
        results.append(CheckResult("FAIL", "versions", text, remedy, ExitCode.UNAVAILABLE))
    elif should:
        results.append(CheckResult("WARN", "versions", "; ".join(map(str, should)), remedy))
    else:
        packages = map(" ".join, identities[0]["packages"].items())
        results.append(CheckResult("OK", "versions", f"{', '.join(packages)}, in all workers"))
    return results


class ReportChecks:
    """Goes through a report, and keeps a result a subject."""

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
        self.results: list[CheckResult] = []

    def add(
        self,
        level: Literal["OK", "WARN", "FAIL"],
        subject: str,
        text: str,
        remedy: str = "",
        code: ExitCode = ExitCode.UNAVAILABLE,
    ) -> None:
        """Keep a result; `remedy` is of all but an OK, `code` of a FAIL."""
        if level != "FAIL":
            code = ExitCode.DONE
        if level == "OK":
            remedy = ""
        self.results.append(CheckResult(level, subject, text, remedy, code))

    def check_group(self) -> None:
        """Check which workers lie where, on which devices, with which code and packages."""
        # Where the workers lie: the first nodes by name, with their ranks.
        identities = self.identities[: len(self.workers)]
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
        spares = len(self.everywhere) - len(self.workers)
        if spares:
            text += f"; {counted(spares, 'spare node')} looked at too"
        other_devices = differences(identities, DEVICE)
        remedy = "expect the speed of the slowest, and other bits where an attempt lies on other devices"
        self.add("WARN" if other_devices else "OK", "workers", "; ".join([text, *map(str, other_devices)]), remedy)

        self.results += check_identities(self.identities, self.requirements.code)

        # A node's GPUs are in the report of its first worker, as its folder is.
        present = 0
        on_cpu = []
        for report in self.workers:
            if report["folder"] is not None:
                present += report["machine"]["gpus_present"]
            if report["identity"]["device"] == "cpu":
                on_cpu.append(report["identity"])
        asked = self.requirements.workers * self.requirements.gpus_per_worker
        text = f"{asked} asked for, {present} on the workers' nodes"
        if asked and on_cpu:
            remedy = "python -c 'import torch; print(torch.cuda.is_available())' there: driver, torch's CUDA build"
            self.add("FAIL", "GPUs", f"{text}; {named(on_cpu[0], len(on_cpu) - 1)} computes on the CPU", remedy)
        elif self.requirements.unused_gpus:
            self.add("WARN", "GPUs", f"{text}; {self.requirements.unused_gpus[0]}")
        elif present and not asked:
            self.add("WARN", "GPUs", f"{text}: the workers compute on the CPU", "type cluster.gpus_per_worker=1")
        else:
            self.add("OK", "GPUs", text)

    def check_links(self) -> None:
        """Check how fast the workers sum, what that costs a step, and which two have the slowest link."""
        network = self.network
        if network is None:
            self.add("OK", "links", "one worker: nothing is sent")
            return
        interfaces = set()
        for worker in self.workers:
            interfaces.add(worker["interface"] or "the default")
        rate = network["bytes"] / network["seconds"]
        text = (
            f"{size_text(network['bytes'])} in {milliseconds(network['seconds'])} ({size_text(round(rate))}/s), one "
            f"number in {milliseconds(network['latency_s'])}, over {', '.join(sorted(interfaces))}"
        )
        self.add("OK", "all-reduce", text)
        # What the summing of gradients costs a step, at that rate.
        for stage in self.requirements.stages:
            seconds = stage.reductions * (network["latency_s"] + stage.gradient_bytes / rate)
            text = (
                f"{stage.name}: {stage.reductions:g} × {size_text(stage.gradient_bytes)} of gradients, about "
                f"{milliseconds(seconds)} a step"
            )
            if stage.compute_s is None:
                self.add("OK", "reduction", f"{text} (plan assumes no speed of CPUs to compare it with)")
                continue
            share = seconds / stage.compute_s
            text += f", {share:.0%} of the {milliseconds(stage.compute_s)} that plan assumes for computing it"
            remedy = "use the fast network for NCCL (docs/design/cluster.md); "
            remedy += "a larger batch_size or zero=1 sums less often"
            self.add("WARN" if share > SLOW_REDUCTION else "OK", "reduction", text, remedy)

        # The slowest pair of workers; a warning where its link is far slower than others of its kind.
        nodes = [worker["identity"]["node"] for worker in self.workers]  # by rank
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
            self.add("OK", "links", text)
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
        self.add("WARN", "links", f"{text}; {count} up to {worst:.0f} × as slow as the fastest of their kind", remedy)

    def check_folder(self) -> None:
        """Check that the run directory is the same storage for all nodes and the driver, that it can do all that a run
        asks, and how far the nodes' clocks are from the driver's.
        """
        if not self.requirements.is_shared:
            self.add("OK", "run folder", "each node's own: the run lies in an object store")
            self.add("OK", "clocks", "not measured: that takes a folder which the driver and the nodes share")
            return
        # 1. Whether it is the same storage; only then do locks and links of a node tell something.
        lacking = [(who, folder["lacks"]) for who, folder in self.folders if folder["lacks"]]
        unseen = [who for who, folder in self.folders if not folder["sees_driver"]]
        unanswered = [who for who, folder in self.folders if not folder["is_answered"]]
        if unseen:
            text = f"not shared: {named(unseen[0])} does not see what the driver has written"
            self.add("FAIL", "run folder", text, SHARED_RUN)
        elif unanswered:
            text = f"not shared: the driver does not see what {named(unanswered[0])} has written"
            self.add("FAIL", "run folder", text, SHARED_RUN)
        elif lacking:
            who, lacks = lacking[0]
            remedy = "docs/storage.md says what it must do; choose another: run=/elsewhere"
            self.add("FAIL", "run folder", f"{named(who)}: {'; '.join(lacks)}", remedy)
        else:
            text = f"the same for the driver and {counted(len(self.folders), 'node')}; links, rename, fsync work"
            self.add("OK", "run folder", text)

        # 2. The clock that is furthest from the driver's.
        worst_s = 0.0
        uncertainty_s = 0.0
        furthest = ""
        for who, folder in self.folders:
            if folder["skew_s"] is None or folder["uncertainty_s"] is None:
                self.add("WARN", "clocks", f"not measured: the driver has not answered {named(who)}")
                return
            if abs(folder["skew_s"]) >= abs(worst_s):
                worst_s = folder["skew_s"]
                uncertainty_s = folder["uncertainty_s"]
                furthest = named(who)
        give_or_take = f"give or take {milliseconds(uncertainty_s)}"
        if abs(worst_s) - uncertainty_s > SKEW_S:
            side = "ahead of" if worst_s > 0 else "behind"
            text = f"the clock of {furthest} is {milliseconds(abs(worst_s))} {side} the driver's, {give_or_take}"
            remedy = "let NTP set the clocks: times in records and incidents of several nodes cannot be compared"
            self.add("WARN", "clocks", text, remedy)
        else:
            self.add("OK", "clocks", f"within {milliseconds(abs(worst_s))} of the driver's, {give_or_take}")

    def check_disk(self) -> None:
        """Check the space in the run directory, and how fast it takes files, against the checkpoints to come."""
        free: float = math.inf
        written_bytes = 0
        written_s = 0.0  # all nodes wrote at the same time: a commit waits for the last of them
        writers = 0
        for _, folder in self.folders:
            if not folder["written_bytes"]:
                continue
            writers += 1
            free = min(free, folder["free_bytes"])
            written_bytes += folder["written_bytes"]
            written_s = max(written_s, folder["written_s"])
        if not writers:
            self.add("WARN", "disk", "not measured: no node could write into the run directory")
            return
        needed = 0
        largest = 0
        for stage in self.requirements.stages:
            needed += stage.disk_bytes
            largest = max(largest, stage.checkpoint_bytes)
        text = f"{size_text(int(free))} free, {size_text(needed)} needed for the checkpoints and weights to come"
        remedy = "make room there, lower keep, or give the run another disk: run=/elsewhere"
        self.add("FAIL" if free < needed else "OK", "disk", text, remedy, ExitCode.IO)

        rate = written_bytes / written_s
        text = (
            f"{size_text(round(rate))}/s written by {counted(writers, 'node')} at once, fsync included: "
            f"a checkpoint of {size_text(largest)} takes about {largest / rate:.1f} s"
        )
        remedy = "saving goes on beside training; see that save_every is longer"
        self.add("WARN" if largest / rate > LONG_SAVE_S else "OK", "disk speed", text, remedy)

    def check_memory(self) -> None:
        """Check the memory that is free against the estimates of `plan`, on the node with the least for each worker."""
        tightest = min(
            self.workers,
            key=lambda worker: worker["machine"]["memory_free"] / self.workers_on[worker["identity"]["node"]],
        )
        node = tightest["identity"]["node"]
        free = tightest["machine"]["memory_free"]
        count = self.workers_on[node]
        stages = self.requirements.stages
        needed = 0
        gpu_needed = 0
        untraced = []
        for stage in stages:
            gpu_needed = max(gpu_needed, stage.memory_bytes or 0)
            if stage.memory_bytes is None:
                untraced.append(stage.name)
            # On a GPU only the copy that a save makes lies in the host's memory.
            bytes_here = stage.snapshot_bytes
            if not self.requirements.gpus_per_worker:
                bytes_here += stage.memory_bytes or 0
            needed = max(needed, bytes_here * count)
        text = f"{memory_text(free)} free on {node} for {counted(count, 'worker')}, about {memory_text(needed)} needed"
        gpu_free = tightest["machine"]["gpu_memory_free"]
        if gpu_free is not None and free >= needed:
            text += f"; {memory_text(gpu_free)} free on its GPU, about {memory_text(gpu_needed)} needed"
        if free < needed:
            remedy = "lower micro_batch or data.processes, raise checkpoint_blocks, or add nodes"
            self.add("WARN", "memory", text, remedy)
        elif gpu_free is not None and gpu_free < gpu_needed:
            self.add("WARN", "memory", text, "lower micro_batch, or raise checkpoint_blocks or zero")
        elif untraced:
            text += f"; without the steps of {', '.join(untraced)}, which could not be traced"
            self.add("WARN", "memory", text, "`python -m jobs plan` says why")
        else:
            self.add("OK", "memory", text)

    def check_limits(self) -> None:
        """Check shared memory, which NCCL needs between the workers of a node, and the limit of open files."""
        least: int | None = None
        node = ""
        for place in self.everywhere:
            free = place["machine"]["shm_free"]
            if free is not None and (least is None or free < least):
                least = free
                node = place["identity"]["node"]
        expected = SHM
        if self.requirements.gpus_per_worker:
            expected = SHM_WITH_GPUS
        if least is None:
            self.add("WARN", "/dev/shm", "not there, so not measured")
        elif least < expected:
            text = f"{memory_text(least)} free on {node}, expected {memory_text(expected)}"
            remedy = "a container: --shm-size=8g, or a volume of medium Memory at /dev/shm"
            self.add("WARN", "/dev/shm", text, remedy)
        else:
            self.add("OK", "/dev/shm", f"{memory_text(least)} free on {node}")

        lowest = min(self.everywhere, key=lambda place: place["machine"]["open_files"])
        limit = lowest["machine"]["open_files"]
        needed = OPEN_FILES + OPEN_FILES_A_WORKER * len(self.workers)
        text = f"{limit:,} for a worker on {lowest['identity']['node']}, about {needed:,} needed"
        remedy = f"ulimit -n {4 * needed} before `ray start`, or LimitNOFILE= of its unit"
        self.add("WARN" if limit < needed else "OK", "open files", text, remedy)

    def check_sets(self) -> None:
        """Check that every node can read every set, and how fast the slowest does."""
        for path, rate_needed in self.requirements.sets.items():
            rates: dict[str, float] = {}  # node → bytes/s
            for place in self.everywhere:
                reach = place["sets"].get(path)
                if reach is None:
                    continue
                if reach["error"]:
                    text = f"{named(place['identity'])} cannot read {path}: {reach['error']}"
                    remedy = (
                        "mount the same storage at the same path on every node, or give that node the store's "
                        "credentials"
                    )
                    self.add("FAIL", "data", text, remedy, ExitCode.DATA)
                    break
                rates[place["identity"]["node"]] = reach["bytes"] / max(reach["seconds"], 1e-9)
            else:
                # The slowest node, against the bytes/s that its workers need of the set.
                slowest = min(rates, key=rates.__getitem__)
                text = f"{path}: {size_text(round(rates[slowest]))}/s read on {slowest}, the slowest of "
                text += counted(len(rates), "node")
                if rate_needed is None:
                    self.add("OK", "data", text)
                    continue
                count = self.workers_on[slowest] or 1
                wanted = rate_needed * count
                text += f"; its {counted(count, 'worker')} take {size_text(round(wanted))}/s at the speed that plan "
                text += "assumes of GPUs"
                remedy = "this was one reader; where several are no faster: faster storage, or copy the shards to the "
                remedy += "nodes"
                self.add("WARN" if rates[slowest] < wanted else "OK", "data", text, remedy)
        for path in self.requirements.not_made:
            self.add("OK", "data", f"{path}: not there yet, a stage before will make it; not read")
