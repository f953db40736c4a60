"""What workers have left in the folder of an attempt."""

import json
from contextlib import suppress
from pathlib import Path

from jobs.cluster.worker import WorkerRecord, worker_file


def records(folder: Path, world: int) -> dict[int, WorkerRecord]:
    """Return the records that workers have left in the attempt's folder so far, by rank."""
    by_rank = {}
    for rank in range(world):
        # It is not there yet, or a shared folder stutters.
        with suppress(OSError, ValueError):
            by_rank[rank] = json.loads(worker_file(folder, rank, ".json").read_text())
    return by_rank
