"""Which workers of which run are on a node, as a gauge on that node's metrics port: ray_patchline_worker{…} is 1.

Prometheus joins it with what Ray says of each node (processors, GPUs, memory, links) by `instance`, so that the nodes
of one run can be told from the others. A thread of the worker sets it; the training loop knows nothing of it.
"""

import time
from pathlib import Path

from ray.util.metrics import Gauge

from jobs.workers.worker_group import RankInfo

NAME = "patchline_worker"
SET_EVERY_S = 10.0  # Ray forgets a gauge that is not set again for about 25 s (measured with 2.60)


def keep_set(folder: Path, info: RankInfo) -> None:
    """Keep the gauge of this worker set until its process ends; `folder` is that of the attempt."""
    stage, _, _ = folder.parents[1].name.rpartition("-")
    tags = {"run": folder.parents[2].name, "stage": stage, "rank": str(info.rank)}
    gauge = Gauge(NAME, "1 for each worker on this node", tag_keys=tuple(tags))
    while True:
        gauge.set(1.0, tags=tags)
        time.sleep(SET_EVERY_S)
