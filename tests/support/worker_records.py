"""Read the records of workers from an attempt's folder."""

import json
from contextlib import suppress
from pathlib import Path

from jobs.cluster.worker import WorkerRecord, worker_file


def records(folder: Path, world: int) -> dict[int, WorkerRecord]:
    """Return the workers' records in the attempt's folder so far, by rank."""
    by_rank = {}
    for rank in range(world):
        # The file is missing, or temporarily unreadable in a shared folder.
        with suppress(OSError, ValueError):
            by_rank[rank] = json.loads(worker_file(folder, rank, ".json").read_text())
    return by_rank
