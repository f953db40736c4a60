"""Renders the reported rows of all parts as one Markdown page: goals, parts, and a table for each section.

A table is a row in `TABLES`: its title, and its columns with the names of the values and their formats. The cell of a
missing value is empty; the row's "note" gives the reason. This module measures nothing, and the page of an unfinished
run is valid too.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Row
from benchmarks.gpu.run import Outcome

ROOT = Path(__file__).parents[2]
HEAD = ("GPU", "driver", "processor", "Python", "torch", "cuDNN", "DeepSpeed", "Ray")  # entries of the machine part


@dataclass(frozen=True)
class Table:
    """One section of the page."""

    title: str
    columns: dict[str, tuple[str, str]]  # heading → name of the value, and its format
    note: str = ""


TABLES = {
    "machine": Table(
        "Machine",
        {"what": ("what", ""), "value": ("value", ",.4g"), "unit": ("unit", "")},
    ),
    "tests": Table(
        "Tests",
        {"test": ("test", ""), "outcome": ("outcome", ""), "s": ("seconds", ".1f")},
    ),
    "campaigns": Table(
        "Campaigns from tars, killed and resumed, against an undisturbed twin",
        {
            "backend": ("backend", ""),
            "stages": ("stages", ""),
            "ZeRO": ("zero", ""),
            "compiled": ("compiled", ""),
            "exact": ("exact", ""),
            "killed after step": ("killed_after", ""),
            "steps": ("steps", ""),
            "repeated": ("repeated", ""),
            "equal bit for bit": ("is_equal", ""),
            "first different step": ("first_difference", ""),
            "largest difference": ("largest_difference", ".3g"),
            "s": ("seconds", ".0f"),
        },
        "bf16. Compared: the losses of all steps, with repeated steps, and the sha256 of the last checkpoint's files.",
    ),
    "ray": Table(
        "Embedded Ray",
        {"what": ("what", ""), "value": ("value", ".0f"), "expected": ("expected", ""), "s": ("seconds", ".1f")},
    ),
    "steps": Table(
        "One training step of a model on one device, bf16: `benchmarks/train_step.py`",
        {
            "model": ("model", ""),
            "images": ("images", ""),
            "code": ("code", ""),
            "step, s": ("step_s", ".4f"),
            "images/s": ("images_per_s", ",.0f"),
            "time / ours": ("to_ours", ".2f"),
            "of the product's speed": ("of_product", ".1%"),
            "of the peak": ("of_peak", ".1%"),
        },
        "Contenders run one after the other. Each is timed in turn with a product of the model's own shape; "
        "time / ours is a ratio of shares of its speed.",
    ),
    "engines": Table(
        "One step of an engine on all devices, bf16, with optimizer, clipping and collectives",
        {
            "model": ("model", ""),
            "images": ("images", ""),
            "workers": ("workers", ""),
            "code": ("code", ""),
            "ZeRO": ("zero", ""),
            "compiled": ("compiled", ""),
            "step, s": ("step_s", ".4f"),
            "images/s": ("images_per_s", ",.0f"),
            "of the peak": ("of_peak", ".1%"),
            "host CPU, s": ("host_cpu_s", ".3f"),
            "idle": ("idle", ".1%"),
            "kernels": ("kernels", ""),
            "deterministic, × time": ("deterministic", ".2f"),
            "GiB": ("memory_gib", ".2f"),
            "planned, GiB": ("planned_gib", ".2f"),
            "measured / planned": ("to_planned", ".2f"),
            "first step, s": ("first_step_s", ".1f"),
            "snapshot, GiB": ("snapshot_gib", ".2f"),
            "allocated in, s": ("snapshot_s", ".2f"),
            "pinned": ("is_pinned", ""),
        },
        "GiB: the peak that torch allocated on the GPU of rank 0; on a CPU the whole process, while the plan "
        "counts tensors. Idle: the share of three profiled steps in which the GPU ran no kernel. Deterministic: "
        "the time of a step with the kernels of exact mode. Snapshot: the host memory of a save.",
    ),
    "shards": Table(
        "Tars",
        {"JPEGs": ("images", ""), "kB an image": ("kilobytes", ".0f"), "s": ("seconds", ".1f")},
    ),
    "tars": Table(
        "Training from tars on one GPU: `jobs run`",
        {
            "model": ("model", ""),
            "batch": ("batch", ""),
            "images/s": ("images_per_s", ",.0f"),
            "of the peak": ("mfu", ".1%"),
            "waits for data": ("wait", ".1%"),
            "storage": ("wait_storage", ".1%"),
            "decoding": ("wait_decode", ".1%"),
            "transfer": ("wait_transfer", ".1%"),
            "GiB": ("memory_gib", ".2f"),
            "first save stalls, s": ("first_stall_s", ".2f"),
            "last": ("later_stall_s", ".2f"),
            "save takes, s": ("save_s", ".2f"),
            "GB": ("save_gb", ".2f"),
        },
        "The first save allocates the host memory of all saves, pinned on a GPU.",
    ),
    "plan": Table(
        "Planned memory of one worker",
        {
            "model": ("model", ""),
            "ZeRO": ("zero", ""),
            "planned, GiB": ("planned_gib", ".2f"),
            "fullest": ("fullest", ""),
            "snapshot on the host, GiB": ("snapshot_gib", ".2f"),
        },
    ),
}


def page(outcomes: Sequence[Outcome], *, device: str, date: str, command: str, commit: str) -> str:
    """Return the page for a run, finished or not."""
    rows: dict[str, list[Row]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.section, []).extend(dict(row) for row in outcome.rows)
    complete(rows)

    title = "On a GPU" if device == "cuda" else "Rehearsal of `make gpu` on a CPU"
    lines = [f"# {title}, {date}", "", f"- command: `{command}`; commit: {commit}"]
    machine = {row["what"]: row["value"] for row in rows.get("machine", [])}
    known = [f"{name} {machine[name]}" for name in HEAD if name in machine]
    if known:
        lines.append(f"- {'; '.join(known)}")
    if device == "cpu":
        lines += ["", "Rehearsed on a CPU with tiny models: the numbers say nothing about a GPU."]

    lines += ["", "| goal | measured |", "|---|---|"]
    for goal, measure in GOALS.items():
        lines.append(f"| {goal} | {measure(rows) or 'not measured'} |")

    lines += ["", "| part | outcome | s | reason |", "|---|---|--:|---|"]
    for outcome in outcomes:
        lines.append(f"| {outcome.part} | {outcome.state} | {outcome.seconds:.0f} | {escaped(outcome.reason)} |")

    rows["machine"] = [row for row in rows.get("machine", []) if row["what"] not in HEAD]
    for section, table in TABLES.items():
        if rows.get(section):
            lines += ["", *rendered(table, rows[section])]
    return "\n".join(lines) + "\n"


def rendered(table: Table, rows: Sequence[Row]) -> list[str]:
    """Return the Markdown lines of a table."""
    headings = [*table.columns, "note"]
    alignments = ["--:" if kind else "---" for _, kind in table.columns.values()]
    lines = [f"## {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines += [f"| {' | '.join(headings)} |", f"|{'|'.join([*alignments, '---'])}|"]
    for row in rows:
        cells = [cell(row.get(name), kind) for name, kind in table.columns.values()]
        lines.append(f"| {' | '.join([*cells, escaped(row.get('note', ''))])} |")
    return lines


def cell(value: Any, kind: str) -> str:
    """Format a value for a cell; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and kind:
        return format(value, kind)
    return escaped(str(value))


def escaped(text: str) -> str:
    """Escape text for use in a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


# ------------------------------------------------------------------------ values of several rows


def complete(rows: dict[str, list[Row]]) -> None:
    """Add values derived from several columns or parts: rates, and ratios to our speed and to the planned memory."""
    for row in [*rows.get("steps", []), *rows.get("engines", [])]:
        if "step_s" in row:
            row["images_per_s"] = row["images"] / row["step_s"]
    ours = {row["model"]: row["of_product"] for row in rows.get("steps", []) if is_measured(row, "ours", "of_product")}
    for row in rows.get("steps", []):
        if "of_product" in row and row["model"] in ours:
            row["to_ours"] = ours[row["model"]] / row["of_product"]
    plans = {(row["model"], row["zero"]): row for row in rows.get("plan", [])}
    for row in rows.get("engines", []):
        # The plan applies to our engine on one worker without compilation.
        key = (row["model"], row["zero"])
        if is_measured(row, "ours", "memory_gib") and row["workers"] == 1 and not row["compiled"] and key in plans:
            row["planned_gib"] = plans[key]["planned_gib"]
            # On a CPU the measurement includes Python and torch, but the plan only tensors.
            if plans[key]["is_gpu"]:
                row["to_planned"] = row["memory_gib"] / row["planned_gib"]


def is_measured(row: Row, code: str, name: str) -> bool:
    return row["code"] == code and name in row


# ------------------------------------------------------------------------ goals


def best_share(rows: dict[str, list[Row]]) -> str:
    """Return the largest share of the GPU's peak that our engine reached with H/14."""
    shares = []
    for row in rows.get("engines", []):
        if row["model"] == "H/14" and row["code"] == "ours" and row.get("of_peak") is not None:
            shares.append(row["of_peak"])
    return f"{max(shares):.1%}" if shares else ""


def times_timm(rows: dict[str, list[Row]]) -> str:
    """Return our speed relative to timm's with H/14, both compiled."""
    shares = {row["code"]: row.get("of_product") for row in rows.get("steps", []) if row["model"] == "H/14"}
    ours = shares.get("ours, compiled")
    timm = shares.get("timm, compiled")
    if not ours or not timm:
        return ""
    return f"{ours / timm:.2f}"


def waiting(rows: dict[str, list[Row]]) -> str:
    """Return the share of time that training H/14 from tars spends waiting for data."""
    shares = [row["wait"] for row in rows.get("tars", []) if row["model"] == "H/14" and "wait" in row]
    return f"{max(shares):.1%}" if shares else ""


def off_plan(rows: dict[str, list[Row]]) -> str:
    """Return the range of the ratios of measured to planned memory."""
    ratios = [row["to_planned"] for row in rows.get("engines", []) if "to_planned" in row]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def exact_resume(rows: dict[str, list[Row]]) -> str:
    """Return whether the killed run in exact mode equals its twin bit for bit."""
    results = [row["is_equal"] for row in rows.get("campaigns", []) if row["exact"]]
    if not results:
        return ""
    return "equal" if all(results) else "different"


GOALS: dict[str, Callable[[dict[str, list[Row]]], str]] = {
    "H/14 at 224 px: at least 43 % of the peak in bf16": best_share,
    "H/14: at least 1.10 times the speed of timm, both compiled": times_timm,
    "H/14 from tars: at most 2 % of the time waiting for data": waiting,
    "memory within 5 % of the plan (0.95 to 1.05)": off_plan,
    "exact mode: a resumed run equals an undisturbed one bit for bit": exact_resume,
}


# ------------------------------------------------------------------------ commit


def commit_of(root: Path = ROOT) -> str:
    """Return the commit of the checkout, from git or, without git, as recorded by `make gpu-bundle`."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=root,
            capture_output=True,
            text=True,
            # Ignore a repository that contains the unpacked checkout.
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)},
        )
    except OSError:
        pass
    else:
        if answer.returncode == 0:
            return answer.stdout.strip()
    recorded = root / ".gpu" / "commit"
    if recorded.exists():
        return recorded.read_text().strip()
    return "unknown"
