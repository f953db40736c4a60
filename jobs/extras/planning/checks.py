"""The table of checks for `plan`, `trial` and `preflight`; each check lists the commands that run it.

In:  "preflight", and the reports of a worker group (ClusterFacts)
Out: OK   clocks      within 3 ms of the driver's, ± 4 ms
     WARN links       all 3 pairs of workers; slowest 0–2 (h0, h2): 1.0 MB in 412.0 ms, 38 × the fastest between nodes
          → check h2's cable, switch port and routes; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME select another interface

The checks of the recipe itself, which `run` also performs, come first (jobs/recipe/validate.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from data.errors import ExitCode
from jobs.extras.planning import cluster_checks as cluster
from jobs.extras.planning import stage_checks as stage
from jobs.extras.planning.cluster_checks import ClusterFacts
from jobs.extras.planning.stage_checks import CheckVerdict, TrainedFacts
from jobs.resolved_recipe import CheckResult

STAGE = "stage"  # needs TrainedFacts: a training stage before anything starts
NODES = "nodes"  # needs ClusterFacts: node reports, available even if the worker group failed
GROUP = "group"  # needs ClusterFacts with the measurements of a worker group


@dataclass(frozen=True)
class Check:
    """A check, with its subject, the facts it needs, and the commands that run it."""

    name: str
    needs: str  # STAGE, NODES or GROUP
    commands: str  # "plan", "trial" and "preflight", separated by spaces
    verdict: Callable[[Any], Iterable[CheckVerdict]]  # yields nothing if the check does not apply
    exit_code: ExitCode = ExitCode.UNAVAILABLE  # exit code of the command after a FAIL


CHECKS = (
    Check("inputs", STAGE, "trial", stage.inputs, ExitCode.DATA),
    Check("cores", STAGE, "plan trial preflight", stage.cores),
    Check("feed", STAGE, "plan preflight", stage.feed),
    Check("memory", STAGE, "plan", stage.memory),
    Check("workers", GROUP, "preflight", cluster.workers),
    Check("code", NODES, "preflight", cluster.code),
    Check("versions", NODES, "preflight", cluster.versions),
    Check("GPUs", GROUP, "preflight", cluster.gpus),
    Check("all-reduce", GROUP, "preflight", cluster.all_reduce),
    Check("reduction", GROUP, "preflight", cluster.reduction),
    Check("links", GROUP, "preflight", cluster.links),
    Check("run folder", GROUP, "preflight", cluster.run_folder),
    Check("clocks", GROUP, "preflight", cluster.clocks),
    Check("disk", GROUP, "preflight", cluster.disk, ExitCode.IO),
    Check("disk speed", GROUP, "preflight", cluster.disk_speed),
    Check("memory", GROUP, "preflight", cluster.memory),
    Check("/dev/shm", GROUP, "preflight", cluster.shared_memory),
    Check("open files", GROUP, "preflight", cluster.open_files),
    Check("data", GROUP, "preflight", cluster.sets, ExitCode.DATA),
)


def results(command: str, facts: TrainedFacts | ClusterFacts, *available: str) -> list[CheckResult]:
    """Run the checks of a command for which facts are available; return the results in table order."""
    shown = []
    for check in CHECKS:
        if command not in check.commands.split() or check.needs not in available:
            continue
        for level, text, remedy in check.verdict(facts):
            if level == "OK":
                remedy = ""
            code = check.exit_code if level == "FAIL" else ExitCode.DONE
            shown.append(CheckResult(level, check.name, text, remedy, code))
    return shown
