"""Break down the time between two attempts of a stage, from the files in the stage's folder.

    python -m benchmarks.pauses runs/digits/pretrain-1a2b3c4d

    attempt  noticed  placed  forked  built  first step  pause
          2      8.6     0.9     0.3    1.9         0.4   12.1    worker 1 on h1, in backward of step 9: its node …

1. noticed: from the last record of the previous attempt to the incident; 0 for a move, which has no incident.
2. placed: until the next attempt is claimed: the workers have ended, and new places are available.
3. forked: until the last worker has started: the agents have started and imported torch.
4. built: until the start record: the workers have joined the group, restored the state and built the engine.
5. first step: until the end of the first report.
"""

import argparse
import itertools
import json
import re
import sys
import time
from pathlib import Path

from pipeline.checkpoints.manifest import attempt_folder
from pipeline.monitoring.telemetry import Record, read_metrics

INCIDENT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) attempt \d+: (worker .*)")
PARTS = ["noticed", "placed", "forked", "built", "first step", "pause"]


def read_incidents(folder: Path) -> list[tuple[float, str]]:
    """Return the time, to the second, and the text of each incident of a stage."""
    incidents = []
    path = folder / "incidents.txt"
    for line in path.read_text().splitlines() if path.exists() else []:
        incident = INCIDENT.match(line)
        if incident is not None:
            incidents.append((time.mktime(time.strptime(incident[1], "%Y-%m-%d %H:%M:%S")), incident[2]))
    return incidents


def pauses(folder: Path) -> list[tuple[int, list[float], str]]:
    """Return the seconds of each part, and the incident, for each attempt after the first."""
    records: dict[int, list[Record]] = {}
    for record in read_metrics(folder, None):
        records.setdefault(record["attempt"], []).append(record)
    incidents = read_incidents(folder)
    rows = []
    previous_end = 0.0
    for number, attempt in sorted(records.items()):
        start = next(record for record in attempt if record["kind"] == "start")
        trained = [record["time"] for record in attempt if record["kind"] == "train"]
        if previous_end and trained:
            workers = [json.loads(path.read_text()) for path in attempt_folder(folder, number).glob("rank-*.json")]
            forked = max((worker["started"] for worker in workers), default=start["claimed"])
            between = [entry for entry in incidents if previous_end - 1 <= entry[0] <= start["claimed"]]
            noticed, why = between[-1] if between else (previous_end, "")
            moments = [previous_end, max(noticed, previous_end), start["claimed"], forked, start["time"], trained[0]]
            parts = [later - earlier for earlier, later in itertools.pairwise(moments)]
            rows.append((number, [*parts, trained[0] - previous_end], why))
        previous_end = attempt[-1]["time"]
    return rows


def main() -> int:
    """Print one row per attempt, and the totals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pauses", description=__doc__)
    parser.add_argument("stage", type=Path, help="folder of a stage, such as runs/digits/pretrain-1a2b3c4d")
    rows = pauses(parser.parse_args().stage)
    print("attempt ", *(f"{part:>10}" for part in PARTS))
    for number, parts, why in rows:
        print(f"{number:7} ", *(f"{seconds:10.1f}" for seconds in parts), f" {why[:60]}")
    print("   sum  ", *(f"{sum(parts[column] for _, parts, _ in rows):10.1f}" for column in range(len(PARTS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
