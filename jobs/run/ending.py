"""How a command on a run has ended: status.json, a line of the run's log, and the closing table.

status.json is needed beside the exit code, because Ray Jobs reduce that to 0 and 1.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.errors import ExitCode, exit_code
from data.files import explain, write_with_reserve
from jobs.stages.sweep import DIVERGED
from pipeline.evaluation.async_evaluation import without_single_seeds
from pipeline.monitoring.telemetry import duration

STATUS_RESERVE_BYTES = 4096  # blanks in status.json: room for the message of an end on a full disk
MOST_VALUES = 6  # that a row of the closing table shows
LONGEST_MESSAGE = 600  # characters; as JSON each may take six bytes


@contextmanager
def status_file(run: Path, command: str, keep: Callable[[str], None]) -> Iterator[None]:
    """Keep status.json true: running while the block works, then done, or the code and message of what it raised.

    `keep` is given the command and its end, for the run's log.
    """
    write_status(run, None, "running", command)
    keep(f"{clock()} started: {command}")
    try:
        yield
    except BaseException as error:
        keep(f"{clock()} ended with exit code {exit_code(error)}: {message_of(error)}")
        with suppress(OSError):  # a full disk may be why we end: say that, not that it is full
            write_status(run, exit_code(error), message_of(error).splitlines()[0], command)
        raise
    keep(f"{clock()} done")
    write_status(run, ExitCode.DONE, "done", command)


def write_status(run: Path, exit_code: int | None, message: str, command: str) -> None:
    """Write status.json: how a command on this run ended, or, with code None, that it is running.

    The end can be written on a full disk too, into the room that "running" has kept.
    """
    record = {
        "exit_code": exit_code,
        "message": message[:LONGEST_MESSAGE],
        "command": command,
        "time": clock(),
    }
    write_with_reserve(run / "status.json", json.dumps(record, indent=1), STATUS_RESERVE_BYTES)


def message_of(error: BaseException) -> str:
    """Return an error's message, or the error's name where the message is empty."""
    text = explain(error) if isinstance(error, OSError) else str(error)
    return text.strip() or type(error).__name__


def clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the closing table as lines: of each stage the images seen, its result and its time."""
    width = max([12, *(len(row["stage"]) for row in rows)])
    lines = [f"{'stage':{width}} {'images seen':>12} {'result':44} {'time':>8}"]
    for row in rows:
        images_seen = f"{row['samples_seen']:,}" if "samples_seen" in row else "-"
        time_text = duration(row["seconds"])
        if row["skipped"]:
            time_text += "*"
        lines.append(f"{row['stage']:{width}} {images_seen:>12} {result_text(row):44} {time_text:>8}")
    if any(row["skipped"] for row in rows):
        lines.append("* finished earlier, skipped now")
    return lines


def result_text(row: Mapping[str, Any]) -> str:
    """Say what a stage came to: its accuracies, or the shards it wrote, or the parameters it carried over."""
    # Of a few-shot probe the table shows the means; the single draws ("…seed…") are in metrics.json.
    metrics = without_single_seeds(row.get("metrics", {}))
    if metrics:
        shown = [f"{name} {value:.1%}" for name, value in metrics.items()]
        if len(shown) > MOST_VALUES:
            shown[MOST_VALUES - 1 :] = [f"… {len(shown)} values in all"]
        return "  ".join(shown)
    if DIVERGED in row:
        return "diverged"
    if "summary" in row:  # of a sweep's table
        return row["summary"]
    if "sets" in row:
        shards = sum(packed["shards"] for packed in row["sets"].values())
        return f"{len(row['sets'])} sets, {shards} shards"
    counts = [f"{row[name]} {name}" for name in ("kept", "resized", "new", "dropped") if row.get(name)]
    return "  ".join(counts)
