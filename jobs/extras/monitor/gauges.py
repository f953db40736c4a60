"""How a run stands as Ray metrics, for Prometheus: ray_patchline_loss{run, stage}, ray_patchline_restarts{…}, …

The driver sets them, so they are on the metrics port of the driver's node; every other node tells which workers it
has (jobs/cluster/ray_agent.py), and Ray tells of each node's processors, GPUs, memory, disks and links. Ray's own
way for a worker's numbers, `train.report`, holds up a step for 2 s a call (measured).

A gauge that is not set again for about 25 s is gone from the port (measured with Ray 2.60): so a stage that has ended
disappears, and the gauges of a stage that trains are set with every look, also when it has reported nothing since.
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

# Those of the newest report in metrics.jsonl, under its names.
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
# Those that the driver adds, with what they say.
OF_DRIVER = {
    "waiting": "1 while no attempt runs: the stage waits for places, or for its next attempt",
    "restarts": "attempts of the stage but the first",
    "incidents": "incidents of the stage, as in incidents.txt",
    "report_age_s": "seconds since the newest report",
    "checkpoint_step": "step of the newest committed checkpoint",
    "checkpoint_age_s": "seconds since the newest commit",
    "is_finite": "0 where the newest loss or gradient norm is not finite; those are not shown then",
}
# Those of the command, whether it is in a stage or not.
OF_RUN = {
    "lease_age_s": "seconds since the driver last renewed the run's lease",
    "exit_code": "the code with which the command has ended, for the last seconds of its gauges",
}


def values_of(message: StatusMessage) -> dict[str, float]:
    """Return the values of a stage's gauges, by name; unknown values and those that are not finite are excluded."""
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
        # Clocks of nodes differ: a record may come from the future.
        values["report_age_s"] = max(0.0, message.time - message.report["time"])
        values["is_finite"] = float(math.isfinite(values.get("loss", 0.0) + values.get("grad_norm", 0.0)))
    if message.commit is not None:
        values["checkpoint_step"] = float(message.commit["step"])
        values["checkpoint_age_s"] = max(0.0, message.time - message.commit["time"])
    # Ray drops NaN without a word (measured).
    return {name: value for name, value in values.items() if math.isfinite(value)}


class Gauges(ThreadedWatcher):
    """Sets one Ray gauge for each name, as soon as this process is connected to a Ray cluster."""

    name = "monitoring"

    def __init__(self) -> None:
        super().__init__()
        self.campaign: Campaign | None = None
        self.lease: Lease | None = None
        self.gauges: dict[str, Gauge] = {}

    def started(self, campaign: Campaign, lease: Lease, log: Log) -> None:
        """Remember whose gauges these are; there is no cluster yet."""
        self.campaign = campaign
        self.lease = lease

    def stage(self, context: Context) -> None:
        """Make the gauges before the first stage that runs under Ray. They outlive a new connection (measured)."""
        super().stage(context)
        # If nothing has imported Ray there is no connection; importing it takes seconds.
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
        """Set the gauges of a stage."""
        for name, value in values_of(message).items():
            self.gauges[name].set(value, tags={"run": message.run, "stage": message.stage})

    def show_run(self) -> None:
        """Set the gauges of the command: the age of its lease, and its exit code once it has ended."""
        assert self.campaign is not None and self.lease is not None
        run = self.campaign.run
        tags = {"run": run.name}
        self.gauges["lease_age_s"].set(self.lease.age_s(), tags=tags)
        exit_code = json.loads((run / "status.json").read_text())["exit_code"]
        # The last call comes after the command has recorded its end; Ray exports it when the cluster is left.
        if exit_code is not None:
            self.gauges["exit_code"].set(exit_code, tags=tags)
