"""A node's agent as a Ray actor, which also exports a Prometheus gauge for each worker on the node."""

import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.metrics import Gauge

from jobs.cluster.agent import Agent
from jobs.cluster.worker import ignore_signal

GAUGE_EVERY_S = 10.0  # Ray drops a gauge after about 25 s without an update (measured with Ray 2.60)
WORKER_GAUGE = "patchline_worker"


class RayAgent(Agent):
    """An agent as a Ray actor; also sets the gauge ray_patchline_worker to 1 for each worker on its node."""

    def __init__(self, has_gpus: bool) -> None:
        super().__init__(ray.util.get_node_ip_address(), has_gpus=has_gpus)
        # Ignore SIGTERM, which a stopping node sends to all processes: the agent must still report how workers end.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ignore_signal)
        threading.Thread(target=self.show_workers, daemon=True).start()

    def show_workers(self) -> None:
        """Set the gauge periodically; in Prometheus, its `instance` label joins it with Ray's metrics for the node."""
        gauge = Gauge(WORKER_GAUGE, "1 for each worker on this node", tag_keys=("run", "stage", "rank"))
        while True:
            with self.changed:
                news = self.news
                ranks = list(self.workers)
                # An attempt's folder is <run>/<stage>-<key>/attempts/attempt-000001.
                *_, run, stage_and_key, _, _ = ("", "", "", "", *self.folder.parts)
            stage, _, _ = stage_and_key.rpartition("-")
            for rank in ranks:
                gauge.set(1.0, tags={"run": run, "stage": stage, "rank": str(rank)})
            # Also set it right after each event, because an attempt may be shorter than the interval.
            deadline = time.monotonic() + GAUGE_EVERY_S
            with self.changed:
                while self.news == news and time.monotonic() < deadline:
                    self.changed.wait(max(0.0, deadline - time.monotonic()))


def call_actor(actor: Any, method: str, *arguments: object) -> "Future[Any]":
    """Call a method of an agent's actor; return a future with the result."""
    future: Future[Any] = getattr(actor, method).remote(*arguments).future()
    return future
