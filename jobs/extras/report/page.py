"""Writes the page of a run, or of several runs side by side (data/extras/pages/templates/run.html and compare.html).

1. The runs are read (jobs/extras/history.py) and, if there are several, compared (jobs/extras/diff).
2. What the template shows is gathered: the stages as they were read, charts, rows of numbers, pictures.
3. The page is rendered, which writes the numbers as text, and written whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.checks import one_line
from data.errors import PatchlineError
from data.extras.pages import page
from data.index.document import load_index
from data.index.index import Index
from data.storage import Storage
from jobs.extras.diff.parting import part
from jobs.extras.diff.recorded import recorded_differences
from jobs.extras.history import DRAW, REPORT, REPORT_VALUES, RunHistory, StageHistory, read_run
from jobs.extras.report import charts
from jobs.extras.report.charts import Line, Mark
from jobs.extras.report.pictures import SAMPLES, Album, Gallery
from jobs.extras.studies.chart import study_chart
from pipeline import artifacts
from pipeline.evaluation.intervals import wilson
from pipeline.values import amount, duration

DETAILED = 6  # trained stages of a run that are shown whole, the newest; a sweep may have hundreds
MOST_RESULTS = 6  # that the first line of the page names
MOST_ROWS = 200  # of a table
MOST_LINES = 12  # of a chart
MOST_CLASSES = 30  # by their accuracy, the worst
# In the order in which people look: the title of a chart, and the value of metrics.jsonl that it shows.
CURVES = {
    "training loss": "loss",
    "learning rate": "lr",
    "gradient norm of training": "grad_norm",
    "images/s of training": "images_per_s",
}
OF_STEPS = ("loss", "grad_norm")  # known of every step, the others of every report
FAILURES = ("evaluate_failed", "checkpoint_failed", "evaluate_skipped")


class Evaluated(NamedTuple):
    """A value of an evaluation with its interval, which judged samples or several draws of the shots give."""

    step: int
    name: str
    value: float
    low: float
    high: float
    judged: int | None
    draws: int
    deviation: float  # between the draws


class OfClass(NamedTuple):
    """How well a class is known, and what its other samples are taken for most often, and how often."""

    name: str
    right: int
    samples: int
    low: float
    high: float
    taken_for: str
    times: int


def write_report(
    paths: Sequence[Path], output: Path, stores: Mapping[Path, Storage] | None = None, *, with_replay: bool = True
) -> Path:
    """Write the page of these runs and return where it is. Raises UsageError where there is no run, OSError.

    A path may be the local copy of a run in a store: `stores` says of which. `with_replay` shows what takes seconds:
    the batches of spikes, for which torch is imported, and images that lie in a store.
    """
    runs = [read_run(path, (stores or {}).get(path)) for path in paths]
    if len(runs) == 1:
        page.write_page(output, "run.html", **run_values(runs[0], Album(with_replay=with_replay)))
    else:
        page.write_page(output, "compare.html", **compare_values(runs))
    return output


# ------------------------------------------------------------------------------------------------ one run


def run_values(run: RunHistory, album: Album) -> dict[str, Any]:
    """Return what run.html shows."""
    detailed = run.trained[-DETAILED:]
    made: dict[str, list[dict[str, Any]]] = {}
    for stage in run.stages:
        for file, read in RESULTS.items():
            if not (stage.folder / file).exists():
                continue
            try:
                values = read(stage, run)
            except (PatchlineError, OSError, ValueError, LookupError, TypeError) as error:
                values = {"problem": str(error)}
            made.setdefault(file, []).append({"name": stage.name, **values})
    return {
        "title": run.name,
        "run": run,
        "verdict": verdict(run),
        "detailed": detailed,
        "not_shown": run.trained[:-DETAILED],
        "details": [stage_values(stage, album) for stage in detailed],
        "made": made,
        "replays": album.replays(run),
        "analyses": album.analyses(run.path),
        "most_classes": MOST_CLASSES,
        "amount": amount,
        "duration": duration,
    }


def verdict(run: RunHistory) -> str:
    """Return how the run stands, in a line."""
    results = []
    unfinished = []
    tables = tuple(f"{stage.name}." for stage in run.stages if "summary" in (stage.done or {}))
    for stage in run.stages:
        if stage.done is None:
            unfinished.append(stage)
        # What sets were packed, and what each run of a sweep came to, is in the table of stages.
        elif stage.result and "sets" not in stage.done and not stage.name.startswith(tables):
            results.append(f"{stage.name} {stage.result}")
    if len(results) > MOST_RESULTS:
        results = [f"{len(results)} results, in the table of stages"]
    if run.state == "done" or not unfinished:
        return f"Done. {'; '.join(results)}"

    stage = unfinished[-1]
    where = f"{stage.name} has not begun its first step"
    to_go = ""
    if stage.reports:
        last = stage.reports[-1]
        where = f"{stage.name} at step {last['step']:,} of {last['steps']:,}, loss {last['loss']:.4g}"
        to_go = f", {duration(last['eta_s'])}"
        if run.state == "stopped":
            to_go += " of work"
        to_go += " to go"
    if run.state == "stopped":
        return f"Stopped: {run.end}. {where}{to_go}."

    # An attempt that has begun leaves a "start"; until then the driver's last line says what is waited for.
    waits = ""
    attempts = list(stage.folder.glob("attempts/attempt-*"))
    if stage.task and len(attempts) > len(stage.starts):
        waits = "; it waits for its workers to start"
        for line in reversed(stage.log_lines):
            _, is_drivers, text = line.partition("[driver] ")
            if is_drivers:
                # A command's first line of a stage says where that is, and nothing of a wait.
                if not text.startswith(f"{stage.name}: key "):
                    waits += f": {text}"
                break
    return f"Running {run.end}: {where}{to_go}{waits}."


def stage_values(stage: StageHistory, album: Album) -> dict[str, Any]:
    """Return what is shown of a trained stage, beside the stage itself."""
    # 1. The curves with what happened on the way, and the same in numbers.
    reach = 0.0
    if stage.reports:
        reach = float(stage.reports[-1]["samples_seen"])
    happened = []
    for start in stage.starts[1:]:
        happened.append(Mark(stage.samples_at(start["step"]), "restart"))
    for first, _ in stage.left_out:
        happened.append(Mark(stage.samples_at(first - 1), "left out"))
    drawn = []
    numbers = []
    for name, lines in curves(stage).items():
        marks = list(happened)
        for spike in stage.of_kind("spike"):
            at_spike = {"loss": spike["recent"][-1]["loss"], "grad_norm": spike["grad_norm"]}
            height = at_spike.get(CURVES[name], math.nan)
            if math.isfinite(height):
                marks.append(Mark(stage.samples_at(spike["step"]), "spike", height))
        drawn.append(charts.line_chart(name, lines, marks, reach=reach))
        # The steps that went on: first, last, least and greatest value, as metrics.jsonl has them.
        value = lines[0].y
        finite = np.flatnonzero(np.isfinite(value))
        if len(finite):
            places = [0, -1, finite[np.argmin(value[finite])], finite[np.argmax(value[finite])]]
            numbers.append((name, list(zip(value[places].tolist(), lines[0].steps[places].tolist(), strict=True))))
    # 2. The evaluations; a single one is no curve.
    evaluated = evaluations(stage)
    by_name: dict[str, list[Evaluated]] = {}
    for row in evaluated:
        by_name.setdefault(row.name, []).append(row)
    lines = []
    for number, (name, rows) in enumerate(by_name.items()):
        points = []
        for row in reversed(rows):
            points.append((stage.samples_at(row.step), row.value, row.low, row.high))
        x, value, low, high = np.array(points).T
        spread = np.maximum([value - low, high - value], 0)
        lines.append(Line(name, x, value, number=number, spread=spread))
    if evaluated and evaluated[0].step != evaluated[-1].step:
        title = "held-out evaluations, 95 % intervals"
        if len(by_name) == 1:
            title = f"held-out {evaluated[0].name}, 95 % intervals"
        drawn.append(charts.line_chart(title, lines[:MOST_LINES], reach=reach, is_share=True))
    # 3. Samples and classes of the newest evaluation.
    judged = None
    classes: list[OfClass] = []
    path = stage.folder / artifacts.EXAMPLES
    if path.exists():
        try:
            examples = artifacts.read_record(path)
            judged_set = load_index(examples["set"])
            judged = album.judged(stage, examples, judged_set)
            # Records of before 2026-11-23 have no counts.
            for label, samples, right, other, times in examples.get("classes", []):
                taken_for = judged_set.class_name(other) if times else ""
                interval = wilson(right / samples, samples)
                name = judged_set.class_name(label)
                classes.append(OfClass(name, right, samples, *interval, taken_for, times))
        except (PatchlineError, OSError, ValueError, LookupError, TypeError) as error:
            judged = Gallery(SAMPLES, [], f"they cannot be shown: {str(error) or repr(error)}")
    classes.sort(key=lambda of_class: (of_class.right / of_class.samples, -of_class.samples))
    # 4. What went wrong, and the sets with their largest classes.
    failures = []
    for record in stage.of_kind(*FAILURES):
        why = one_line(str(record.get("error") or record.get("reason")))
        failures.append((record["step"], record["kind"].replace("_", " "), why))
    sets: list[dict[str, Any]] = []
    for name, index in stage.sets.items():
        if not isinstance(index, Index):
            sets.append({"name": name, "problem": index})
            continue
        largest = np.argsort(-np.array(index.class_counts, int), kind="stable")[:MOST_ROWS].tolist()
        sets.append({"name": name, "index": index, "labels": largest, "shards": index.shards[:MOST_ROWS]})
        # Parts of one set share its tars, and differ in their samples.
        if index.origin is not None:
            sets[-1]["parent"] = os.path.normpath(index.tables / index.origin.index / "..")
    seconds = asdict(stage.account)
    return {
        "stage": stage,
        "charts": drawn,
        "numbers": numbers,
        "evaluations": evaluated,
        "spikes": album.spikes(stage),
        "judged": judged,
        "classes": classes,
        "stopped": seconds.pop("stopped"),
        "seconds": seconds,
        "failures": failures,
        "sets": sets,
    }


def curves(stage: StageHistory) -> dict[str, list[Line]]:
    """Return the lines of each chart of a trained stage: the steps that went on, and those that were taken again."""
    charted: dict[str, list[Line]] = {}
    reports = np.array(list(map(REPORT_VALUES, stage.kept_reports)), REPORT)
    for name, field in CURVES.items():
        kept = stage.steps if field in OF_STEPS else reports
        is_of_steps = field in OF_STEPS
        charted[name] = [Line(name, kept["samples_seen"], kept[field], kept["step"], is_smoothed=is_of_steps)]
        for attempt in np.unique(stage.lost.attempt):
            lost = stage.lost[stage.lost.attempt == attempt]
            if field in OF_STEPS:
                label = f"lost steps of attempt {attempt}"
                charted[name].append(Line(label, lost.samples_seen, lost[field], is_faded=True))
    return charted


def evaluations(stage: StageHistory) -> list[Evaluated]:
    """Return the values of a stage's evaluations with their intervals, the newest first."""
    by_step = {}
    for record in stage.of_kind("evaluate"):
        by_step[record["step"]] = record  # a step evaluated twice counts once
    rows = []
    for step, record in sorted(by_step.items(), reverse=True):
        for name, value in record.items():
            # Single draws of a few-shot probe are in metrics.jsonl; people see their mean.
            if not isinstance(value, float) or name in ("time", "seconds") or DRAW in name:
                continue
            row = Evaluated(step, name, value, low=value, high=value, judged=None, draws=0, deviation=0.0)
            draws = [record[other] for other in record if other.startswith(f"{name}{DRAW}")]
            if name == "accuracy" and "judged" in record:
                low, high = wilson(value, record["judged"])
                row = row._replace(low=low, high=high, judged=record["judged"])
            elif len(draws) > 1:
                row = row._replace(draws=len(draws), deviation=float(np.std(draws, ddof=1)))
            rows.append(row)
    return rows


def document_values(stage: StageHistory, run: RunHistory) -> dict[str, Any]:
    """Return the values of a stage `evaluate`, from its evaluation.json."""
    rows = []
    for result in json.loads((stage.folder / "evaluation.json").read_text())["results"]:
        for name, entry in result["values"].items():
            interval = (float(entry["low"]), float(entry["high"]))
            rows.append((result["set"]["name"], name, float(entry["value"]), interval, int(entry["samples"])))
    return {"rows": rows}


def figure_values(stage: StageHistory, run: RunHistory) -> dict[str, Any]:
    """Return the figure of a study, and its text."""
    record = artifacts.read_record(stage.folder / "figure.json")
    has_paper = "paper" in record  # beside ours, in a panel as wide
    return {"chart": study_chart(record), "has_paper": has_paper, "text": (stage.folder / "figure.md").read_text()}


def sweep_values(stage: StageHistory, run: RunHistory) -> dict[str, Any]:
    """Return a sweep as a table and a plot, and the losses of its runs over one another."""
    record = artifacts.read_record(stage.folder / "sweep.json")
    values: dict[str, Any] = {"metric": record["metric"], "chosen": record["chosen"], "rows": []}
    drawn = []
    spread_of = "± between runs"
    names = set()
    lost: dict[str, str] = {}  # rows without a number, and why
    for result in record["runs"]:
        names.add(result["stage"])
        if result["diverged"]:
            lost[result["row"]] = "diverged"
    for name, means in {**record["rows"], **record["means"]}.items():
        mean = means.get(record["metric"])
        values["rows"].append((name, mean, lost.get(name, "")))
        if mean is not None:
            deviation = mean["sd"] or 0.0
            low, high = mean["interval"] or (mean["mean"] - deviation, mean["mean"] + deviation)
            if mean["interval"]:
                spread_of = "95 %"
            drawn.append((name, mean["mean"], low, high))
    if drawn:
        title = f"{stage.name}: {record['metric']}, {spread_of}"
        values["chart"] = charts.value_chart(title, drawn[:MOST_ROWS])
    lines: list[Line] = []
    for other in run.stages:
        if other.name in names and other.reports:
            steps = other.steps
            lines.append(Line(other.name, steps.samples_seen, steps.loss, number=len(lines), is_smoothed=True))
    if lines:
        values["losses"] = charts.line_chart("training loss of the runs", lines[:MOST_LINES])
    return values


# What a stage has left, by its file; each is shown below the name of the stage.
RESULTS = {"sweep.json": sweep_values, "figure.json": figure_values, "evaluation.json": document_values}


# ------------------------------------------------------------------------------------------------ several runs


def compare_values(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """Return what compare.html shows: of each stage that the runs share, its curves and where they part."""
    # A run is called as its folder, with its parent's name where two are called alike.
    names = {run.path: run.name for run in runs}
    if len(set(names.values())) < len(names):
        for run in runs:
            names[run.path] = f"{run.path.parent.name}/{run.name}"
    # Two stages that were named by their folders are compared whatever they are called.
    have_one_each = all(len(run.trained) == 1 for run in runs)
    shared: dict[str, dict[str, StageHistory]] = {}  # by the stage's name: name of the run → stage
    for run in runs:
        for stage in run.trained:
            name = "the one trained stage of each" if have_one_each else stage.name
            # Of several folders of one name the newest, the last, counts: the others are of earlier configs.
            shared.setdefault(name, {})[names[run.path]] = stage
    compared = []
    alone = []
    for name, of_runs in shared.items():
        if len(of_runs) > 1:
            compared.append(compare_stage(name, of_runs))
        else:
            alone.append((name, *of_runs))
    return {
        "title": f"{len(runs)} runs: {', '.join(names.values())}",
        "runs": runs,
        "names": names,
        "verdict": verdict,
        "compared": compared,
        "alone": alone,
    }


def compare_stage(name: str, of_runs: Mapping[str, StageHistory]) -> dict[str, Any]:
    """Return what is shown of a stage of several runs: the first of them beside each of the others."""
    (base_name, base), *rest = of_runs.items()
    others = []
    marks = []
    for run_name, stage in rest:
        differing = recorded_differences(base, stage)
        parting = part(base, stage, differing)
        if parting.step is not None:
            marks.append(Mark(base.samples_at(parting.step), "parted"))
        others.append({"name": run_name, "differences": differing[:MOST_ROWS], "parting": parting})
    # Of each run a line in every chart, how far it has come, and its newest evaluation.
    charted: dict[str, list[Line]] = {}
    rows = []
    metric = ""
    results = []
    for number, (run_name, stage) in enumerate(of_runs.items()):
        if number < MOST_LINES:
            for chart, lines in curves(stage).items():
                charted.setdefault(chart, []).append(lines[0]._replace(label=run_name, number=number))
        evaluated = evaluations(stage)
        newest = [row for row in evaluated if row.step == evaluated[0].step]
        rows.append((run_name, stage, newest))
        for row in newest:
            metric = metric or row.name  # one that all of them may have
            if row.name == metric:
                results.append((run_name, row.value, row.low, row.high))
    drawn = []
    for chart, lines in charted.items():
        drawn.append(charts.line_chart(chart, lines, marks if CURVES[chart] == "loss" else ()))
    if results:
        drawn.append(charts.value_chart(f"held-out {metric}, the newest, 95 %", results))
    return {"name": name, "base": base_name, "others": others, "charts": drawn, "rows": rows}
