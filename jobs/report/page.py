"""Writes the page of a run, or of several runs side by side (data/templates/run.html and compare.html).

1. The runs are read (reading.py), and where there are several, compared (comparing.py).
2. What the template shows is gathered: a verdict, charts, tables of plain values, pictures.
3. The page is rendered and written whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from data import page
from data.checks import one_line
from data.errors import PatchlineError
from data.index.index import Index
from jobs.report import charts
from jobs.report.charts import Line, Mark
from jobs.report.comparing import curve, differences, part
from jobs.report.pictures import Album, first_line
from jobs.report.reading import Run, Stage, read_run
from pipeline import artifacts
from pipeline.evaluation.intervals import wilson
from pipeline.monitoring.telemetry import account, amount, duration

DETAILED = 6  # trained stages of a run that are shown whole, the newest; a sweep may have hundreds
MOST_ROWS = 200  # of a table
MOST_LINES = 12  # of a chart
DRAW = "-seed-"  # in the name of a value that is of a single draw of the shots
FAILURES = ("evaluate_failed", "checkpoint_failed", "evaluate_skipped")


def write_report(paths: Sequence[Path], output: Path, *, with_replay: bool = True) -> Path:
    """Write the page of these runs and return where it is. Raises UsageError where there is no run, OSError.

    `with_replay` shows the batches of spikes, for which torch is imported.
    """
    runs = [read_run(path) for path in paths]
    if len(runs) == 1:
        page.write_page(output, "run.html", **run_values(runs[0], Album(with_replay=with_replay)))
    else:
        page.write_page(output, "compare.html", **compare_values(runs))
    return output


# ------------------------------------------------------------------------------------------------ one run


def run_values(run: Run, album: Album) -> dict[str, Any]:
    """Return what run.html shows."""
    detailed = run.trained[-DETAILED:]
    return {
        "title": run.name,
        "verdict": verdict(run),
        "command": run.command if run.state == "stopped" else "",
        "stages": [stage_row(stage, run) for stage in run.stages],
        "not_shown": [stage.name for stage in run.trained[:-DETAILED]],
        "details": [stage_values(stage, album) for stage in detailed],
        "documents": [values for stage in run.stages for values in document_values(stage)],
        "sweeps": [sweep_values(stage, run) for stage in run.stages if (stage.folder / "sweep.json").exists()],
        "analyses": album.analyses(run.path),
    }


def verdict(run: Run) -> str:
    """Return how the run stands, in a line."""
    unfinished = [stage for stage in run.stages if stage.done is None]
    if run.state == "done" or not unfinished:
        results = [f"{stage.name} {result_of(stage)}" for stage in run.stages if stage.done and result_of(stage)]
        return f"Done. {'; '.join(results)}"
    stage = unfinished[-1]
    where = f"{stage.name} has not begun its first step"
    to_go = ""
    if stage.reports:
        last = stage.reports[-1][2]
        where = f"{stage.name} at step {last['step']:,} of {last['steps']:,}, loss {last['loss']:.4g}"
        to_go = duration(last["eta_s"])
    if run.state == "running":
        # An attempt that has begun leaves a "start"; until then the driver's last line says what is waited for.
        attempts = len(list(stage.folder.glob("attempts/attempt-*")))
        driver_lines = [line for line in stage.log_lines if line.startswith("[driver] ")]
        waits = ""
        if stage.task and attempts > len(stage.starts):
            waits = "; it waits for its workers to start"
            if driver_lines:
                waits += f": {driver_lines[-1].removeprefix('[driver] ')}"
        return f"Running {run.end}: {where}{f', {to_go} to go' if to_go else ''}{waits}."
    return f"Stopped: {run.end}. {where}{f', {to_go} of work to go' if to_go else ''}."


def stage_row(stage: Stage, run: Run) -> dict[str, Any]:
    """Return a stage's row of the first table."""
    state = "running" if run.state == "running" else "not finished"
    if stage.problem:
        state = "CANNOT TELL"
    elif stage.done is not None:
        state = "diverged" if "diverged" in stage.done else "done"
    row = {
        "name": stage.name,
        "folder": stage.folder.name,
        "is_shown": stage in run.trained[-DETAILED:],
        "state": state,
        "images": "",
        "result": stage.problem or result_of(stage),
        "time": "",
    }
    if stage.reports:
        row["images"] = f"{stage.reports[-1][2]['samples_seen']:,}"
    if stage.done is not None:
        row["time"] = duration(stage.done["seconds"])
    return row


def result_of(stage: Stage) -> str:
    """Return what a stage came to, or how far it is."""
    if stage.done is not None:
        if "summary" in stage.done or "diverged" in stage.done:
            return str(stage.done.get("diverged") or stage.done["summary"])
        metrics = {name: value for name, value in stage.done.get("metrics", {}).items() if DRAW not in name}
        return ", ".join(f"{name} {value:.2%}" for name, value in metrics.items())
    if stage.reports:
        last = stage.reports[-1][2]
        return f"step {last['step']:,} of {last['steps']:,}"
    return ""


def stage_values(stage: Stage, album: Album) -> dict[str, Any]:
    """Return what is shown of a trained stage."""
    values: dict[str, Any] = {"name": stage.name, "folder": stage.folder.name, "problem": stage.problem}
    # 1. The curves, and the same in numbers.
    restarts = [Mark(stage.samples_at(start["step"]), "restart") for start in stage.starts[1:]]
    gaps = [Mark(stage.samples_at(first - 1), "left out") for first, _ in stage.left_out]
    drawn = []
    numbers = []
    for name, lines in curves(stage).items():
        marks = [*restarts, *gaps]
        for spike in stage.of_kind("spike"):
            if name in ("loss", "gradient norm"):
                value = spike["recent"][-1]["loss"] if name == "loss" else spike["grad_norm"]
                marks.append(Mark(stage.samples_at(spike["step"]), "spike", value if math.isfinite(value) else None))
        drawn.append(charts.line_chart(name, lines, marks))
        numbers.append(extremes(name, stage))
    values["evaluations"], chart = evaluations(stage)
    if chart is not None:
        drawn.append(chart)
    values["charts"] = drawn
    values["numbers"] = [row for row in numbers if row]
    values["restarts"] = [f"attempt {start['attempt']}: {start['text']}" for start in stage.starts]
    values["left_out"] = [f"steps {first:,} to {last:,}" for first, last in stage.left_out]
    values["spikes"] = album.spikes(stage)
    # 2. Where the wall time went.
    spent = account(stage.records)
    seconds = {name: value for name, value in asdict(spent).items() if value > 0}
    values["time"] = [
        {"name": name, "share": value / spent.wall, "time": duration(value)}
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    values["wall"] = duration(spent.wall)
    # 3. Samples and incidents.
    values["judged"] = album.judged(stage)
    values["incidents"] = stage.incidents
    values["failures"] = []
    for record in stage.of_kind(*FAILURES):
        why = one_line(str(record.get("error") or record.get("reason")))
        values["failures"].append(f"step {record['step']:,}: {record['kind'].replace('_', ' ')}: {why}")
    # 4. Data and provenance.
    values["bad"] = stage.reports[-1][2]["bad_samples"] if stage.reports else 0
    values["named_bad"] = stage.named_bad_samples
    values["ledger"] = stage.reports[-1][2]["ledger"] if stage.reports else ""
    values["sets"] = [set_values(name, index) for name, index in stage.sets.items()]
    job = stage.task.get("job", {})
    values["provenance"] = {
        "key": stage.record.get("key"),
        "code": job.get("code"),
        "weights that it starts from": job.get("init") or "none: random weights",
        "command": stage.provenance.get("command"),
        **stage.provenance.get("environment", {}),
        "hardware": ", ".join(dict.fromkeys(start.get("hardware", "") for start in stage.starts)),
        "workers": ", then ".join(str(start["world"]) for start in stage.starts),
    }
    files = (stage.done or {}).get("files", {})
    values["files"] = [(name, f"{file['bytes']:,}", file["sha256"]) for name, file in files.items()]
    return values


CURVES: dict[str, str] = {"learning rate": "lr", "images/s": "images_per_s"}  # of reports, one value each


def curves(stage: Stage) -> dict[str, list[Line]]:
    """Return the lines of each chart of a trained stage: the steps that went on, and those that were taken again."""
    steps = stage.steps
    charted: dict[str, list[Line]] = {}
    for name, y in {"loss": steps.loss, "gradient norm": steps.grad_norm}.items():
        charted[name] = [Line(name, *curve(stage, y))]
        for attempt in np.unique(steps.attempt[~steps.kept]):
            is_lost = ~steps.kept & (steps.attempt == attempt)
            label = f"lost steps of attempt {attempt}"
            charted[name].append(Line(label, steps.samples[is_lost], y[is_lost], is_faded=True))
    for name, field in CURVES.items():
        kept = [report for _, is_kept, report in stage.reports if is_kept]
        x = np.array([report["samples_seen"] for report in kept], float)
        charted[name] = [Line(name, x, np.array([report[field] for report in kept], float))]
    # In the order in which people look: loss, learning rate, gradient norm, images/s.
    return {name: charted[name] for name in ("loss", "learning rate", "gradient norm", "images/s")}


def extremes(name: str, stage: Stage) -> dict[str, str] | None:
    """Return a curve in numbers, as metrics.jsonl has them: first, last, least and greatest value with their steps."""
    if name in CURVES:
        kept = [report for _, is_kept, report in stage.reports if is_kept]
        step = np.array([report["step"] for report in kept], int)
        value = np.array([report[CURVES[name]] for report in kept], float)
    else:
        kept_steps = stage.steps.kept
        step = stage.steps.step[kept_steps]
        value = (stage.steps.loss if name == "loss" else stage.steps.grad_norm)[kept_steps]
    finite = np.flatnonzero(np.isfinite(value))
    if not len(finite):
        return None
    least = finite[np.argmin(value[finite])]
    most = finite[np.argmax(value[finite])]
    places = {"first": 0, "last": -1, "least": least, "most": most}
    row = {"name": name}
    for title, place in places.items():
        row[title] = f"{float(value[place])!r} (step {step[place]:,})"
    return row


def evaluations(stage: Stage) -> tuple[list[dict[str, Any]], Markup | None]:
    """Return the values of a stage's evaluations with their intervals, the newest first, and their chart."""
    rows: list[dict[str, Any]] = []
    by_step = {record["step"]: record for record in stage.of_kind("evaluate")}  # a step evaluated twice counts once
    for step, record in sorted(by_step.items(), reverse=True):
        for name, value in record.items():
            # Single draws of a few-shot probe are in metrics.jsonl; people see their mean.
            if not isinstance(value, float) or name in ("time", "seconds") or DRAW in name:
                continue
            row = {"step": step, "name": name, "value": value, "interval": "", "low": value, "high": value}
            draws = [record[other] for other in record if other.startswith(f"{name}{DRAW}")]
            if name == "accuracy" and "judged" in record:
                row["low"], row["high"] = wilson(value, record["judged"])
                row["interval"] = f"{row['low']:.2%} to {row['high']:.2%}, of {record['judged']:,} samples"
            elif len(draws) > 1:
                row["interval"] = f"± {np.std(draws, ddof=1):.2%} between {len(draws)} draws of the shots"
            rows.append(row)
    if len(by_step) < 2:
        return rows, None
    lines = []
    for number, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        of_name = [row for row in reversed(rows) if row["name"] == name]
        x = np.array([stage.samples_at(row["step"]) for row in of_name])
        value, low, high = np.array([(row["value"], row["low"], row["high"]) for row in of_name]).T
        lines.append(Line(name, x, value, number, spread=np.maximum([value - low, high - value], 0)))
    return rows, charts.line_chart("evaluations, accuracy with 95 % intervals", lines[:MOST_LINES])


def set_values(name: str, index: Index | str) -> dict[str, Any]:
    """Return what is shown of a set: its classes, what was passed over in its tars, and its tars."""
    if isinstance(index, str):
        return {"name": name, "problem": index}
    largest = np.argsort(-np.array(index.class_counts, int), kind="stable")[:MOST_ROWS].tolist()
    shards = [index.shards[number] for number in range(min(len(index.shards), MOST_ROWS))]
    return {
        "name": name,
        "path": str(index.directory),
        "samples": f"{index.samples:,}",
        "bytes": f"{amount(index.bytes)}B",
        "digest": index.digest,
        "refused": index.refused,
        "classes": [(index.class_name(label), f"{index.class_counts[label]:,}") for label in largest],
        "class_count": index.classes,
        "shards": [(shard.name, f"{shard.samples:,}", f"{shard.bytes:,}", shard.sha256) for shard in shards],
        "shard_count": len(index.shards),
    }


def document_values(stage: Stage) -> list[dict[str, Any]]:
    """Return the values of a stage `evaluate`, from its evaluation.json."""
    path = stage.folder / "evaluation.json"
    if not path.exists():
        return []
    try:
        rows = []
        for result in json.loads(path.read_text())["results"]:
            for name, entry in result["values"].items():
                interval = f"{entry['low']:.2%} to {entry['high']:.2%}"
                rows.append((result["set"]["name"], name, f"{entry['value']:.2%}", interval, f"{entry['samples']:,}"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [{"name": stage.name, "problem": first_line(error), "rows": []}]
    return [{"name": stage.name, "problem": "", "rows": rows}]


def sweep_values(stage: Stage, run: Run) -> dict[str, Any]:
    """Return a sweep as a table and a plot, and the losses of its runs over one another."""
    try:
        record = artifacts.read_record(stage.folder / "sweep.json")
        metric = record["metric"]
        rows = []
        drawn = []
        for name, means in {**record["rows"], **record["means"]}.items():
            mean = means.get(metric)
            if mean is None:
                rows.append((name, "diverged", "", "", 0))
                continue
            interval = ""
            low, high = mean["interval"] or (mean["mean"], mean["mean"])
            if mean["interval"]:
                interval = f"{low:.2%} to {high:.2%}"
            deviation = "" if mean["sd"] is None else f"± {mean['sd']:.2%}"
            rows.append((name, f"{mean['mean']:.2%}", interval, deviation, mean["runs"]))
            drawn.append((name, mean["mean"], low, high))
    except (PatchlineError, OSError, LookupError, TypeError) as error:
        return {"name": stage.name, "problem": first_line(error)}
    names = {result["stage"] for result in record["runs"]}
    stages = [other for other in run.stages if other.name in names and other.reports]
    lines = [Line(other.name, *curve(other, other.steps.loss), number) for number, other in enumerate(stages)]
    return {
        "name": stage.name,
        "problem": "",
        "metric": metric,
        "rows": rows,
        "chosen": record["chosen"],
        "chart": charts.value_chart(f"{stage.name}: {metric}", drawn[:MOST_ROWS]) if drawn else None,
        "losses": charts.line_chart("loss of the runs", lines[:MOST_LINES]) if lines else None,
    }


# ------------------------------------------------------------------------------------------------ several runs


def compare_values(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what compare.html shows: of each stage that the runs share, its curves and where they part."""
    # Two stages that were named by their folders are compared whatever they are called.
    have_one_each = all(len(run.trained) == 1 for run in runs)
    pairs: dict[str, list[tuple[Run, Stage]]] = {}
    for run in runs:
        # Of several folders of one name the newest counts: the others are of earlier configs.
        newest = {stage.name: stage for stage in run.trained}
        for name, stage in newest.items():
            pairs.setdefault("the one trained stage of each" if have_one_each else name, []).append((run, stage))
    names = run_names(runs)
    return {
        "title": f"{len(runs)} runs: {', '.join(names.values())}",
        "runs": [{"name": names[run.path], "path": str(run.path), "verdict": verdict(run)} for run in runs],
        "compared": [compared(name, of_runs, names) for name, of_runs in pairs.items() if len(of_runs) > 1],
        "alone": [f"{name} ({names[of_runs[0][0].path]})" for name, of_runs in pairs.items() if len(of_runs) == 1],
    }


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Return a short name for each run, with its parent's where two are called alike."""
    names = {run.path: run.name for run in runs}
    if len(set(names.values())) < len(names):
        names = {run.path: f"{run.path.parent.name}/{run.name}" for run in runs}
    return names


def compared(name: str, of_runs: Sequence[tuple[Run, Stage]], names: dict[Path, str]) -> dict[str, Any]:
    """Return what is shown of a stage of several runs: the first of them beside each of the others."""
    base_run, base = of_runs[0]
    others = []
    marks = []
    for run, stage in of_runs[1:]:
        differing = differences(base, stage)
        parting = part(base, stage, differing)
        if parting.step is not None:
            marks.append(Mark(base.samples_at(parting.step), "parted"))
        others.append({"name": names[run.path], "differences": differing[:MOST_ROWS], "parting": parting})
    drawn = []
    of_each = [curves(stage) for _, stage in of_runs[:MOST_LINES]]
    for chart in of_each[0]:
        lines = []
        for number, ((run, _), of_run) in enumerate(zip(of_runs, of_each, strict=False)):
            lines.append(of_run[chart][0]._replace(label=names[run.path], number=number))
        drawn.append(charts.line_chart(chart, lines, marks if chart == "loss" else ()))
    rows = []
    results: list[tuple[str, float, float, float]] = []
    for run, stage in of_runs:
        last = stage.reports[-1][2] if stage.reports else {}
        values, _ = evaluations(stage)
        newest = [row for row in values if row["step"] == values[0]["step"]]
        said = ", ".join(f"{row['name']} {row['value']:.2%} ({row['interval'] or 'no interval'})" for row in newest)
        loss = f"{last['loss']:.6g}" if last else "-"
        rows.append((names[run.path], last.get("step", "-"), loss, result_of(stage), said))
        for row in newest[:1]:
            results.append((f"{names[run.path]} {row['name']}", row["value"], row["low"], row["high"]))
    return {
        "name": name,
        "base": names[base_run.path],
        "others": others,
        "charts": drawn,
        "rows": rows,
        "chart": charts.value_chart("the newest evaluation, 95 %", results) if results else None,
    }
