"""The newest metrics of a run as Ray metrics, for Prometheus and the dashboard: ray_patchline_loss{run, stage}, …

The driver sets them from metrics.jsonl. Ray's own way, `train.report` in the workers, holds up a step for 2 s a call
(measured).
"""

from pathlib import Path

from ray.util.metrics import Gauge

from pipeline.monitoring.telemetry import last_metrics

NAMES = ("step", "loss", "lr", "grad_norm", "images_per_s", "wait", "memory_gb", "eta_s", "samples_seen", "bad_samples")


class Gauges:
    """One Ray gauge for each name; they are made when the cluster is connected."""

    def __init__(self, run: Path) -> None:
        self.run = run.name
        self.gauges: dict[str, Gauge] = {}
        for name in NAMES:
            self.gauges[name] = Gauge(f"patchline_{name}", f"{name} in metrics.jsonl", tag_keys=("run", "stage"))
        self.shown_bytes: dict[Path, int] = {}  # size of a metrics.jsonl when it was last read

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Set the gauges where metrics.jsonl has grown."""
        directory = attempt_folder.parents[1]
        path = directory / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size == self.shown_bytes.get(path, 0):
            return
        self.shown_bytes[path] = size

        metrics = last_metrics(directory)
        if metrics is None:
            return
        # The folder is <stage>-<key>, and a stage's own name may hold dashes.
        stage, _, _ = directory.name.rpartition("-")
        for name, gauge in self.gauges.items():
            gauge.set(float(metrics[name]), tags={"run": self.run, "stage": stage})
