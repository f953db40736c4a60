"""What a preflight has found out, judged: one line a subject, OK, WARN or FAIL, with what to do.

In:  what the workers have reported (pipeline/preflight/worker.py), and what the recipe will ask of them (`Needs`)
Out: OK   clocks      within 3 ms of the driver's, give or take 4 ms
     WARN links       all 3 pairs of workers; slowest 0–2 (h0, h2): 1.0 MB in 412.0 ms, 38 × the fastest between nodes
          → look at h2's cable, switch port and routes; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME name another interface

Nothing here measures, reads or waits: the same reports have the same lines.
"""

from collections import Counter
from collections.abc import Sequence

from data.errors import ExitCode
from data.files import memory_text, size_text
from jobs.commands.links import judge_links
from jobs.commands.needs import Finding, Needs
from pipeline.monitoring.telemetry import counted, milliseconds
from pipeline.preflight.folder import FolderReport
from pipeline.preflight.identity import and_more, named, other_code, other_devices, other_packages
from pipeline.preflight.start import SKEW_S
from pipeline.preflight.worker import PreflightReport, WorkerReport
from pipeline.versions import MUST_BE_EQUAL, SHOULD_BE_EQUAL

LONG_SAVE_S = 60.0
SHM_WITH_GPUS = 2**30  # bytes; NCCL's manual asks for --shm-size=1g
SHM = 2**26  # bytes; what Docker gives
OPEN_FILES_A_WORKER = 8  # that a process has open for each other worker: gloo's connections, in each of its groups
OPEN_FILES = 512  # for everything else; shards take a quarter of the limit, whatever it is (data.shards.reader)


def judge(report: PreflightReport, needs: Needs) -> list[Finding]:
    """Judge everything that the workers have reported; what matters most comes first."""
    workers = report["workers"]
    return [
        judge_workers(workers),
        judge_code(workers, needs.code),
        judge_versions(workers),
        judge_gpus(workers, needs),
        *judge_links(report["network"], workers, needs),
        judge_folder(workers, needs),
        judge_clocks(workers, needs),
        *judge_disk(workers, needs),
        judge_memory(workers, needs),
        judge_shm(workers, needs),
        judge_open_files(workers),
        *judge_sets(workers, needs),
    ]


# ------------------------------------------------------------------------ who the workers are


def judge_workers(workers: Sequence[WorkerReport]) -> Finding:
    """Say how many workers lie on which nodes, and on which devices they compute."""
    identities = [worker["identity"] for worker in workers]
    ranks_of: dict[str, list[str]] = {}
    for worker in identities:
        ranks_of.setdefault(worker["node"], []).append(str(worker["rank"]))
    nodes = ", ".join(f"{node}: {','.join(ranks)}" for node, ranks in list(ranks_of.items())[:8])
    if len(ranks_of) > 8:
        nodes += ", …"
    device = identities[0]["device"]
    text = f"{len(workers)} on {counted(len(ranks_of), 'node')} ({nodes}), on {device}"
    if identities[0]["driver"]:
        text += f", GPU driver {identities[0]['driver']}"
    differences = other_devices(identities)
    if differences:
        remedy = "expect the speed of the slowest, and other bits where an attempt lies on other devices"
        return Finding("WARN", "workers", f"{text}; {'; '.join(differences)}", remedy)
    return Finding("OK", "workers", text)


def judge_code(workers: Sequence[WorkerReport], code: str) -> Finding:
    """Say whether all workers run the code of this command."""
    text = other_code([worker["identity"] for worker in workers], code)
    if text:
        remedy = "bring the checkout of that node up to date, or take it off its PYTHONPATH; then run this again"
        return Finding("FAIL", "code", text, remedy, ExitCode.UNAVAILABLE)
    return Finding("OK", "code", f"{code[:12]}, this command's, in all workers")


def judge_versions(workers: Sequence[WorkerReport]) -> Finding:
    """Say which versions all workers have, or who has others."""
    identities = [worker["identity"] for worker in workers]
    remedy = "install there what constraints.txt pins"
    texts = other_packages(identities, MUST_BE_EQUAL)
    if texts:
        return Finding("FAIL", "versions", "; ".join(texts), remedy, ExitCode.UNAVAILABLE)
    texts = other_packages(identities, SHOULD_BE_EQUAL)
    if texts:
        return Finding("WARN", "versions", "; ".join(texts), remedy)
    packages = ", ".join(f"{name} {version}" for name, version in identities[0]["packages"].items())
    return Finding("OK", "versions", f"{packages}, in all workers")


def judge_gpus(workers: Sequence[WorkerReport], needs: Needs) -> Finding:
    """Compare the GPUs that are asked for with those that are there."""
    present = sum(worker["machine"]["gpus_present"] for worker in workers if worker["folder"] is not None)
    asked = needs.workers * needs.gpus_per_worker
    text = f"{asked} asked for, {present} on the workers' nodes"
    on_cpu = [worker["identity"] for worker in workers if worker["identity"]["device"] == "cpu"]
    if asked and on_cpu:
        remedy = "python -c 'import torch; print(torch.cuda.is_available())' there: driver, torch's CUDA build"
        who = f"{named(on_cpu[0])}{and_more(on_cpu)}"
        return Finding("FAIL", "GPUs", f"{text}; {who} computes on the CPU", remedy, ExitCode.UNAVAILABLE)
    if needs.unused_gpus:
        return Finding("WARN", "GPUs", f"{text}; {needs.unused_gpus[0]}")
    if present and not asked:
        return Finding("WARN", "GPUs", f"{text}: the workers compute on the CPU", "type cluster.gpus_per_worker=1")
    return Finding("OK", "GPUs", text)


# ------------------------------------------------------------------------ the run directory


def folders(workers: Sequence[WorkerReport]) -> list[tuple[WorkerReport, FolderReport]]:
    """Return the first worker of each node, with what it says of the folder."""
    firsts = []
    for worker in workers:
        if worker["folder"] is not None:
            firsts.append((worker, worker["folder"]))
    return firsts


def judge_folder(workers: Sequence[WorkerReport], needs: Needs) -> Finding:
    """Say whether the run directory is the same storage for all nodes and the driver, and can do what a run asks."""
    if not needs.is_shared:
        return Finding("OK", "run folder", "each node's own: the run lies in an object store")
    remedy = "give the run a directory on storage that every node mounts at the same path: run=/shared/NAME"
    for worker, folder in folders(workers):
        who = named(worker["identity"])
        if not folder["sees_driver"]:
            text = f"not shared: {who} does not see what the driver has written"
            return Finding("FAIL", "run folder", text, remedy, ExitCode.UNAVAILABLE)
        if not folder["is_answered"]:
            text = f"not shared: the driver does not see what {who} has written"
            return Finding("FAIL", "run folder", text, remedy, ExitCode.UNAVAILABLE)
    for worker, folder in folders(workers):
        if folder["lacks"]:
            text = f"{named(worker['identity'])}: {'; '.join(folder['lacks'])}"
            remedy = (
                "mount it with locks and hard links: NFS 4, Lustre with -o flock; or choose another: run=/elsewhere"
            )
            return Finding("FAIL", "run folder", text, remedy, ExitCode.UNAVAILABLE)
    count = len(folders(workers))
    return Finding(
        "OK", "run folder", f"the same for the driver and {counted(count, 'node')}; locks, links, rename, fsync work"
    )


def judge_clocks(workers: Sequence[WorkerReport], needs: Needs) -> Finding:
    """Say how far the nodes' clocks are from the driver's."""
    if not needs.is_shared:
        return Finding("OK", "clocks", "not measured: that takes a folder which the driver and the nodes share")
    worst_s = 0.0
    uncertainty_s = 0.0
    who = ""
    for worker, folder in folders(workers):
        if folder["skew_s"] is None or folder["uncertainty_s"] is None:
            return Finding("WARN", "clocks", f"not measured: the driver has not answered {named(worker['identity'])}")
        if abs(folder["skew_s"]) >= abs(worst_s):
            worst_s = folder["skew_s"]
            uncertainty_s = folder["uncertainty_s"]
            who = named(worker["identity"])
    give_or_take = f"give or take {milliseconds(uncertainty_s)}"
    if abs(worst_s) - uncertainty_s > SKEW_S:
        side = "ahead of" if worst_s > 0 else "behind"
        text = f"the clock of {who} is {milliseconds(abs(worst_s))} {side} the driver's, {give_or_take}"
        remedy = "let NTP set the clocks: times in records and incidents of several nodes cannot be compared"
        return Finding("WARN", "clocks", text, remedy)
    return Finding("OK", "clocks", f"within {milliseconds(abs(worst_s))} of the driver's, {give_or_take}")


def judge_disk(workers: Sequence[WorkerReport], needs: Needs) -> list[Finding]:
    """Compare the room in the run directory, and how fast it takes files, with the checkpoints to come."""
    written = [folder for _, folder in folders(workers) if folder["written_bytes"]]
    if not written:
        return [Finding("WARN", "disk", "not measured: no node could write into the run directory")]
    free = min(folder["free_bytes"] for folder in written)
    needed = sum(stage.disk_bytes for stage in needs.stages)
    text = f"{size_text(free)} free, {size_text(needed)} needed for the checkpoints and weights to come"
    room = Finding("OK", "disk", text)
    if free < needed:
        remedy = "make room there, lower keep, or give the run another disk: run=/elsewhere"
        room = Finding("FAIL", "disk", text, remedy, ExitCode.IO)

    # All nodes wrote at the same time; the last one to finish tells what a commit waits for.
    total = sum(folder["written_bytes"] for folder in written)
    rate = total / max(folder["written_s"] for folder in written)
    largest = max((stage.checkpoint_bytes for stage in needs.stages), default=0)
    text = (
        f"{size_text(round(rate))}/s written by {counted(len(written), 'node')} at once, fsync included: "
        f"a checkpoint of {size_text(largest)} takes about {largest / rate:.1f} s"
    )
    speed = Finding("OK", "disk speed", text)
    if largest / rate > LONG_SAVE_S:
        speed = Finding("WARN", "disk speed", text, "saving goes on beside training; see that save_every is longer")
    return [room, speed]


# ------------------------------------------------------------------------ the nodes


def judge_memory(workers: Sequence[WorkerReport], needs: Needs) -> Finding:
    """Compare the memory that is free with what `plan` estimates, on the node that has the least for each worker."""
    counts = workers_by_node(workers)
    tightest = min(workers, key=lambda worker: worker["machine"]["memory_free"] / counts[worker["identity"]["node"]])
    node = tightest["identity"]["node"]
    free = tightest["machine"]["memory_free"]
    needed = 0
    for stage in needs.stages:
        # On a GPU only the copy that a save makes lies in the host's memory.
        bytes_here = stage.snapshot_bytes
        if not needs.gpus_per_worker:
            bytes_here += stage.memory_bytes or 0
        needed = max(needed, bytes_here * counts[node])
    free_text = f"{memory_text(free)} free on {node} for {counted(counts[node], 'worker')}"
    text = f"{free_text}, about {memory_text(needed)} needed"
    if free < needed:
        return Finding("WARN", "memory", text, "lower micro_batch, activation_gb or data.processes, or add nodes")

    gpu_free = tightest["machine"]["gpu_memory_free"]
    if gpu_free is not None:
        gpu_needed = max((stage.memory_bytes or 0 for stage in needs.stages), default=0)
        text += f"; {memory_text(gpu_free)} free on its GPU, about {memory_text(gpu_needed)} needed"
        if gpu_free < gpu_needed:
            return Finding("WARN", "memory", text, "lower micro_batch or activation_gb, or raise zero")
    untraced = [stage.name for stage in needs.stages if stage.memory_bytes is None]
    if untraced:
        text += f"; without the steps of {', '.join(untraced)}, which could not be traced"
        return Finding("WARN", "memory", text, "`patchline plan` says why")
    return Finding("OK", "memory", text)


def judge_shm(workers: Sequence[WorkerReport], needs: Needs) -> Finding:
    """Say how much shared memory there is: NCCL needs it between the workers of a node."""
    least = None
    node = ""
    for worker in workers:
        free = worker["machine"]["shm_free"]
        if free is not None and (least is None or free < least):
            least = free
            node = worker["identity"]["node"]
    if least is None:
        return Finding("WARN", "/dev/shm", "not there, so not measured")
    text = f"{memory_text(least)} free on {node}"
    wanted = SHM_WITH_GPUS if needs.gpus_per_worker else SHM
    if least < wanted:
        remedy = "a container: --shm-size=8g, or a volume of medium Memory at /dev/shm"
        return Finding("WARN", "/dev/shm", f"{text}, expected {memory_text(wanted)}", remedy)
    return Finding("OK", "/dev/shm", text)


def judge_open_files(workers: Sequence[WorkerReport]) -> Finding:
    """Compare the limit of open files with what so many workers need."""
    least = min(workers, key=lambda worker: worker["machine"]["open_files"])
    limit = least["machine"]["open_files"]
    needed = OPEN_FILES + OPEN_FILES_A_WORKER * len(workers)
    text = f"{limit:,} for a worker on {least['identity']['node']}, about {needed:,} needed"
    if limit < needed:
        return Finding(
            "WARN", "open files", text, f"ulimit -n {4 * needed} before `ray start`, or LimitNOFILE= of its unit"
        )
    return Finding("OK", "open files", text)


def judge_sets(workers: Sequence[WorkerReport], needs: Needs) -> list[Finding]:
    """Say whether every node can read every set, and how fast the slowest does."""
    findings = []
    for path, rate_needed in needs.sets.items():
        findings.append(judge_set(workers, path, rate_needed))
    for path in needs.not_made:
        findings.append(Finding("OK", "data", f"{path}: not there yet, a stage before will make it; not read"))
    return findings


def judge_set(workers: Sequence[WorkerReport], path: str, rate_needed: float | None) -> Finding:
    """Say whether every node can read a set, and how fast the slowest does."""
    slowest = ""
    slowest_rate = float("inf")  # bytes/s
    readers = [worker for worker in workers if path in worker["sets"]]
    for worker in readers:
        reach = worker["sets"][path]
        if reach["error"]:
            text = f"{named(worker['identity'])} cannot read {path}: {reach['error']}"
            remedy = "mount the same storage at the same path on every node, or give that node the store's credentials"
            return Finding("FAIL", "data", text, remedy, ExitCode.DATA)
        rate = reach["bytes"] / max(reach["seconds"], 1e-9)
        if rate < slowest_rate:
            slowest_rate = rate
            slowest = worker["identity"]["node"]
    text = (
        f"{path}: {size_text(round(slowest_rate))}/s read on {slowest}, the slowest of {counted(len(readers), 'node')}"
    )
    if rate_needed is None:
        return Finding("OK", "data", text)
    count = workers_by_node(workers)[slowest]
    wanted = rate_needed * count
    text += f"; its {counted(count, 'worker')} take {size_text(round(wanted))}/s at the speed that plan assumes of GPUs"
    if slowest_rate < wanted:
        remedy = "this was one reader; where several are no faster: faster storage, or copy the shards to the nodes"
        return Finding("WARN", "data", text, remedy)
    return Finding("OK", "data", text)


def workers_by_node(workers: Sequence[WorkerReport]) -> Counter[str]:
    """Return how many workers lie on each node."""
    return Counter(worker["identity"]["node"] for worker in workers)
