"""Export a run's state as Ray metrics for Prometheus: ray_patchline_loss{run, stage}, ray_patchline_restarts{…}, …

The driver sets these gauges, so they appear on the metrics port of the driver's node. Each node also exports a gauge
for its workers (jobs/cluster/ray_agent.py), and Ray exports the CPUs, GPUs, memory, disks and network of each node.
Ray's own way to report numbers from a worker, `train.report`, delays the step by 2 s per call (measured).

Ray drops a gauge about 25 s after it was last set (measured with Ray 2.60). Therefore, the gauges of a finished
stage disappear, and those of a running stage are set at every poll, even if there is no new report.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING

from jobs.extras.monitor.threaded import ThreadedWatcher
from jobs.ownership import Lease
from jobs.resolved_recipe import Campaign, Context
from jobs.run.reading import StatusMessage
from jobs.run.watchers import Log

if TYPE_CHECKING:  # importing Ray takes seconds
    from ray.util.metrics import Gauge

# Fields of the newest report in metrics.jsonl.
OF_REPORT = (
    "step",
    "steps",
    "loss",
    "lr",
    "grad_norm",
    "images_per_s",
    "tflops_per_worker",
    "mfu",
    "wait",
    "wait_storage",
    "wait_decode",
    "wait_transfer",
    "memory_gb",
    "eta_s",
    "samples_seen",
    "bad_samples",
    "world",
)
# Values that the driver adds, with their descriptions.
OF_DRIVER = {
    "waiting": "1 while no attempt is running because the stage waits for resources or for its next attempt",
    "restarts": "number of restarts of the stage: attempts after the first",
    "incidents": "number of incidents of the stage, as in incidents.txt",
    "report_age_s": "seconds since the newest report",
    "checkpoint_step": "step of the newest committed checkpoint",
    "checkpoint_age_s": "seconds since the newest commit",
    "is_finite": "0 if the newest loss or gradient norm is not finite, in which case their gauges are not set",
}
# Values of the command, which are also set between stages.
OF_RUN = {
    "lease_age_s": "seconds since the driver last renewed the run's lease",
    "exit_code": "exit code of the command, exported for a few seconds after its end",
}


def values_of(message: StatusMessage) -> dict[str, float]:
    """Return the values of a stage's gauges by name; unknown and non-finite values are omitted."""
    values: dict[str, float] = {
        "waiting": float(message.state == "waiting"),
        "restarts": float(max(0, message.attempts - 1)),
        "incidents": float(message.incidents),
    }
    if message.report is not None:
        for name in OF_REPORT:
            number = message.report.get(name)
            if number is not None:
                values[name] = float(number)
        # The clocks of nodes differ, so a record's time can be in the future.
        values["report_age_s"] = max(0.0, message.time - message.report["time"])
        values["is_finite"] = float(math.isfinite(values.get("loss", 0.0) + values.get("grad_norm", 0.0)))
    if message.commit is not None:
        values["checkpoint_step"] = float(message.commit["step"])
        values["checkpoint_age_s"] = max(0.0, message.time - message.commit["time"])
    # Omit NaN, which Ray drops silently (measured).
    return {name: value for name, value in values.items() if math.isfinite(value)}


class Gauges(ThreadedWatcher):
    """Sets one Ray gauge per value, after this process has joined a Ray cluster."""

    name = "monitoring"

    def __init__(self) -> None:
        super().__init__()
        self.campaign: Campaign | None = None
        self.lease: Lease | None = None
        self.gauges: dict[str, Gauge] = {}

    def started(self, campaign: Campaign, lease: Lease, log: Log) -> None:
        """Store the campaign and its lease; no gauges are set, because the command has not joined the cluster yet."""
        self.campaign = campaign
        self.lease = lease

    def stage(self, context: Context) -> None:
        """Create the gauges before the first stage that runs on Ray; the gauges survive a reconnection (measured)."""
        super().stage(context)
        # If Ray has not been imported, there is no connection; importing it would take seconds.
        if self.gauges or "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
            return
        from ray.util.metrics import Gauge

        for name in OF_REPORT:
            self.gauges[name] = Gauge(f"patchline_{name}", f"{name} in metrics.jsonl", tag_keys=("run", "stage"))
        for name, text in OF_DRIVER.items():
            self.gauges[name] = Gauge(f"patchline_{name}", text, tag_keys=("run", "stage"))
        for name, text in OF_RUN.items():
            self.gauges[name] = Gauge(f"patchline_{name}", text, tag_keys=("run",))
        self.start(context.log)

    def show(self, message: StatusMessage) -> None:
        """Set a stage's gauges."""
        for name, value in values_of(message).items():
            self.gauges[name].set(value, tags={"run": message.run, "stage": message.stage})

    def show_run(self) -> None:
        """Set the command's gauges: the age of the lease and, once the command has ended, the exit code."""
        assert self.campaign is not None and self.lease is not None
        run = self.campaign.run
        tags = {"run": run.name}
        self.gauges["lease_age_s"].set(self.lease.age_s(), tags=tags)
        exit_code = json.loads((run / "status.json").read_text())["exit_code"]
        # The last call comes after the command has recorded its exit code; Ray exports it when leaving the cluster.
        if exit_code is not None:
            self.gauges["exit_code"].set(exit_code, tags=tags)
