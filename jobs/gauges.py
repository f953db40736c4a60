"""The newest metrics of a run as Ray metrics, for Prometheus and the dashboard: ray_patchline_loss{run, stage}, …

The driver sets them from metrics.jsonl: reporting from the workers would cost a step (2 s a call, measured).
"""

from pathlib import Path

from ray.util.metrics import Gauge

from pipeline.telemetry import last_metrics

NAMES = ("step", "loss", "lr", "grad_norm", "images_per_s", "wait", "memory_gb", "eta_s", "samples_seen", "bad_samples")


class Gauges:
    """One gauge a name, made when the cluster is there."""

    def __init__(self, run: Path) -> None:
        self.run = run.name
        self.gauges = {n: Gauge(f"patchline_{n}", f"{n} in metrics.jsonl", tag_keys=("run", "stage")) for n in NAMES}
        self.shown: dict[Path, int] = {}

    def tick(self, folder: Path, number: int) -> None:
        """Set the gauges where metrics.jsonl has grown."""
        directory = folder.parents[1]
        path = directory / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size == self.shown.get(path, 0):
            return
        self.shown[path] = size
        last = last_metrics(directory)
        if last is None:
            return
        for name, gauge in self.gauges.items():
            gauge.set(float(last[name]), tags={"run": self.run, "stage": directory.name.rpartition("-")[0]})
