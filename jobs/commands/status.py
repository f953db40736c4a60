"""`python -m jobs status RUN`: stage, step, loss, images/s, ETA, last checkpoint, from the run directory alone."""

import json
import socket
import time
from pathlib import Path

import psutil

from data.errors import CheckpointError, UsageError
from pipeline import checkpoint
from pipeline.accounting import account
from pipeline.telemetry import amount, duration, last_metrics, read_metrics


def status(run: Path) -> list[str]:
    """One block a stage folder, in the order they were first started. Raises UsageError where there is no run."""
    folders = sorted((p.parent for p in run.glob("*/stage.json")), key=lambda p: p.stat().st_ctime)
    if not folders:
        known = sorted({p.parents[1].name for p in run.parent.glob("*/*/stage.json")})
        raise UsageError(f"no run at {run}\n  runs beside it: {', '.join(known) or 'none'}")
    lines = [f"run  {run}", f"end  {ending(run)}"]
    for folder in folders:
        lines.append(f"{folder.name:24} {stage_line(folder)}")
    return lines


def ending(run: Path) -> str:
    """How the last command on this run ended, or who owns it now."""
    try:
        last = json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return "unknown: no command has ended yet"
    if last["exit_code"] is None:
        gone = owner_is_gone(run)
        state = "killed, or lost with its machine: run the same command again; it was" if gone else "running,"
        return f"{state} started {last['time']}: {last['command']}"
    return f"{last['message']} (exit {last['exit_code']}, {last['time']})"


def owner_is_gone(run: Path) -> bool:
    """True where the owner was a process of this machine that no longer lives."""
    try:
        owner = json.loads((run / "owner.json").read_text())
    except (OSError, ValueError):
        return False
    return owner.get("host") == socket.gethostname() and not psutil.pid_exists(owner["pid"])


def stage_line(folder: Path) -> str:
    done = folder / "done.json"
    if done.exists():
        outcome = json.loads(done.read_text())
        scores = {k: v for k, v in outcome.get("metrics", {}).items() if "seed" not in k}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        return f"done in {duration(outcome['seconds'])}  {shown}".rstrip()
    last = last_metrics(folder)
    if last is None:
        return "started, no step yet"
    return (
        f"step {last['step']}/{last['steps']}  loss {last['loss']:.4f}  img/s {amount(last['images_per_s'])}  "
        f"eta {duration(last['eta_s'])}  {age(last['time'])} ago  {checkpoint_line(folder)}  "
        f"{account(read_metrics(folder, None)).line()}"
    )


def checkpoint_line(folder: Path) -> str:
    found = checkpoint.committed(folder / "checkpoints")
    if not found:
        return "no checkpoint yet"
    try:
        return f"last checkpoint step {checkpoint.read_manifest(found[0]).step}"
    except CheckpointError as error:
        return f"last checkpoint unreadable: {error}"


def age(then: float) -> str:
    return duration(max(time.time() - then, 0))
