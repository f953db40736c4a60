"""Write the HTML report of one run, or of several runs side by side (templates run.html and compare.html).

1. Read the runs (jobs/extras/history.py); compare them if there are several (jobs/extras/diff).
2. Collect the values for the template: stages, charts, tables and pictures.
3. Render the template, and write the report atomically. The templates are in data/extras/pages/templates.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter

from data.checks import one_line
from data.errors import PatchlineError
from data.extras.pages import page
from data.index.document import load_index
from data.index.index import Index
from data.storage import Storage
from jobs.extras.diff.first_difference import find_first_difference
from jobs.extras.diff.recorded import recorded_differences
from jobs.extras.history import DRAW, REPORT, REPORT_VALUES, RunHistory, StageHistory, flat, measured, read_run
from jobs.extras.report import charts
from jobs.extras.report.charts import Line, Mark
from jobs.extras.report.pictures import SAMPLES, Album, Gallery
from jobs.extras.studies.chart import study_charts
from jobs.stage_folders import RECORD, started_s
from pipeline import artifacts
from pipeline.evaluation.intervals import wilson
from pipeline.extras.usage import FILES as USAGE_FILES
from pipeline.monitoring.telemetry import Record
from pipeline.values import amount, duration
from pipeline.variables import restored

DETAILED = 6  # number of newest training stages shown in detail; a sweep can have hundreds
MAX_RESULTS = 6  # maximum number of results in the first line of the report
MAX_ROWS = 200  # maximum number of rows of a table
OF_SET = re.compile(r"set .*: (tar|class) ")  # name of a difference in a tar or class of a data set
DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
MAX_COMPARED = 2_000_000  # maximum number of samples whose positions are compared
MAX_LINES = 12  # maximum number of lines in a chart
MAX_FADED = 40  # maximum number of grey lines, for further runs
THIN = 40  # buckets of a grey line
MAX_PAIRWISE = 6  # maximum number of runs that are compared with the first one
MAX_SETTINGS = 12  # columns of the table of runs
OVER_TIME = ("training loss",)  # curves that are also drawn over time
MAX_MATRIX = 20  # maximum number of rows of a confusion matrix
MAX_PAIRS = 15  # number of listed mistakes, the most frequent first
MAX_CLASSES = 30  # number of listed classes, those with the lowest accuracy
# Title of each chart, in page order → plotted field of metrics.jsonl.
CURVES = {
    "training loss": "loss",
    "learning rate": "lr",
    "gradient norm of training": "grad_norm",
    "images/s of training": "images_per_s",
}
# Title of each chart of the workers' use of their machines → field of their files, and whether it is a share.
USAGE = {
    "CPU cores in use": ("cores", False),
    "memory of the worker, GiB": ("memory_gb", False),
    "GPU utilisation": ("gpu", True),
}
OF_STEPS = ("loss", "grad_norm")  # fields recorded for every step; others are recorded only at reports
FAILURES = ("evaluate_failed", "checkpoint_failed", "evaluate_skipped")


class EvaluatedMetric(NamedTuple):
    """A metric from one evaluation, with a confidence interval from the number of samples or few-shot draws."""

    step: int
    name: str
    value: float
    low: float
    high: float
    samples: int | None
    draws: int
    deviation: float  # standard deviation across the draws
    is_share: bool = True  # False for a loss


class Confusion(NamedTuple):
    """A confusion matrix of the classes with the most frequent mistakes, and these mistakes."""

    columns: list[str]
    rows: list[tuple[str, int, list[int]]]  # class, samples, predictions of each column (and others)
    pairs: list[tuple[str, str, int, int]]  # class, predicted class, number of mistakes, samples of the class
    classes: int  # number of classes in the data set


class ClassAccuracy(NamedTuple):
    """The accuracy of a class with its confidence interval, and the class with which it is most often confused."""

    name: str
    correct: int
    samples: int
    low: float
    high: float
    confused_with: str
    confusions: int  # number of samples predicted as `confused_with`


def write_report(
    paths: Sequence[Path], output: Path, stores: Mapping[Path, Storage] | None = None, *, with_replay: bool = True
) -> Path:
    """Write the report of one or several runs, and return its path.

    If a path is the local copy of a run in an object store, `stores` maps the path to that store. `with_replay` adds
    parts that take seconds: the batches of spikes, which need torch, and images stored in an object store. Raises
    UsageError if there is no run, or OSError if a file cannot be read or written.
    """
    runs = [read_run(path, (stores or {}).get(path)) for path in paths]
    if len(runs) == 1:
        page.write_page(output, "run.html", **run_values(runs[0], Album(with_replay=with_replay)))
    else:
        page.write_page(output, "compare.html", **compare_values(runs))
    return output


# ------------------------------------------------------------------------------------------------ one run


def run_values(run: RunHistory, album: Album) -> dict[str, Any]:
    """Return the variables for the template run.html, the report of one run."""
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
        "most_classes": MAX_CLASSES,
        "amount": amount,
        "duration": duration,
    }


def verdict(run: RunHistory) -> str:
    """Describe the state of a run in one line."""
    results = []
    unfinished = []
    tables = tuple(f"{stage.name}." for stage in run.stages if "summary" in (stage.done or {}))
    for stage in run.stages:
        if stage.done is None:
            unfinished.append(stage)
        # Packed data sets and single runs of a sweep are only in the table of stages.
        elif stage.result and "sets" not in stage.done and not stage.name.startswith(tables):
            results.append(f"{stage.name} {stage.result}")
    if len(results) > MAX_RESULTS:
        results = [f"{len(results)} results, see the table of stages"]
    if run.state == "done" or not unfinished:
        return f"Done. {'; '.join(results)}"

    # The stage that was started last; others may have been abandoned with --fresh.
    stage = max(reversed(unfinished), key=lambda stage: stage.record.get("resumed", 0.0))
    where = f"{stage.name} has not reported a step yet"
    to_go = ""
    if stage.reports:
        last = stage.reports[-1]
        where = f"{stage.name} at step {last['step']:,} of {last['steps']:,}, loss {last['loss']:.4g}"
        to_go = f", {duration(last['eta_s'])}"
        if run.state == "stopped":
            to_go += " of work"
        to_go += " left"
    if run.state == "stopped":
        return f"Stopped: {run.end}. {where}{to_go}."

    # An attempt writes a "start" record when it begins. Before that, the driver's last log line has the reason.
    waits = ""
    attempts = list(stage.folder.glob("attempts/attempt-*"))
    if stage.task and len(attempts) > len(stage.starts):
        waits = "; waiting for its workers to start"
        for line in reversed(stage.log_lines):
            _, is_drivers, text = line.partition("[driver] ")
            if is_drivers:
                # The driver's first line about a stage only names its folder.
                if not text.startswith(f"{stage.name}: key "):
                    waits += f": {text}"
                break
    return f"Running {run.end}: {where}{to_go}{waits}."


def stage_values(stage: StageHistory, album: Album) -> dict[str, Any]:
    """Return the template variables of one training stage."""
    # 1. Curves with their events, and their extreme values as numbers.
    reach = 0.0
    if stage.reports:
        reach = float(stage.reports[-1]["samples_seen"])
    events = []
    for start in stage.starts[1:]:
        events.append(Mark(stage.samples_at(start["step"]), "restart"))
    for first, _ in stage.excluded_steps:
        events.append(Mark(stage.samples_at(first - 1), "excluded"))
    drawn = []
    numbers = []
    for name, lines in curves(stage).items():
        marks = list(events)
        for spike in stage.of_kind("spike"):
            at_spike = {"loss": spike["recent"][-1]["loss"], "grad_norm": spike["grad_norm"]}
            height = float(measured(at_spike.get(CURVES[name], math.nan)))
            if math.isfinite(height):
                marks.append(Mark(stage.samples_at(spike["step"]), "spike", height))
        drawn.append(charts.line_chart(name, lines, marks, reach=reach))
        # First, last, smallest and largest value among the final steps, exactly as in metrics.jsonl.
        value = lines[0].y
        finite = np.flatnonzero(np.isfinite(value))
        if len(finite):
            places = [0, -1, finite[np.argmin(value[finite])], finite[np.argmax(value[finite])]]
            numbers.append((name, list(zip(value[places].tolist(), lines[0].steps[places].tolist(), strict=True))))
    # 2. Evaluations, with a chart if there are at least two.
    evaluated = evaluations(stage)
    by_name: dict[str, list[EvaluatedMetric]] = {}
    for row in evaluated:
        if row.is_share:
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
        drawn.append(charts.line_chart(title, lines[:MAX_LINES], reach=reach, is_share=True))
    held_out = held_out_loss(stage)
    if len(held_out.x) > 1:
        x, y, size = charts.smooth(stage.steps.samples_seen, stage.steps.loss)
        training = Line(f"training, mean of {size:,} step{'s' if size > 1 else ''}", x, y, number=1)
        drawn.append(charts.line_chart("held-out loss", [held_out, training], reach=reach))
    drawn += usage_charts(stage)
    # 3. Sample images and accuracy per class of the newest evaluation.
    predictions = None
    classes: list[ClassAccuracy] = []
    confusion = None
    path = stage.folder / artifacts.EXAMPLES
    if path.exists():
        try:
            examples = artifacts.read_record(path)
            evaluated_set = load_index(restored(examples["set"], path))
            predictions = album.predictions(stage, examples, evaluated_set)
            # Records written before 2026-11-23 have no counts per class.
            for label, samples, correct, other, confusions in examples.get("classes", []):
                confused_with = evaluated_set.class_name(other) if confusions else ""
                interval = wilson(correct / samples, samples)
                name = evaluated_set.class_name(label)
                classes.append(ClassAccuracy(name, correct, samples, *interval, confused_with, confusions))
            # Records written before 2026-11-29 have no confusions.
            if "confusions" in examples:
                counts = {label: (of_label, right) for label, of_label, right, *_ in examples["classes"]}
                confusion = confusion_of(counts, examples["confusions"], evaluated_set.class_name)
        except (PatchlineError, OSError, ValueError, LookupError, TypeError) as error:
            predictions = Gallery(SAMPLES, [], f"the samples cannot be shown: {str(error) or repr(error)}")
    classes.sort(key=lambda of_class: (of_class.correct / of_class.samples, -of_class.samples))
    # 4. Failures and notices, and the data sets with their largest classes.
    failures = []
    for record in stage.records:
        if "notice" in record or record["kind"] in FAILURES:
            why = one_line(str(record.get("notice") or record.get("error") or record.get("reason")))
            failures.append((record["step"], record["kind"].replace("_", " "), why))
    for record in stage.of_kind("evaluate"):
        for name, metric in metrics_of(record).items():
            if not 0 <= metric <= 1:
                failures.append((record["step"], "evaluation", f"{name} is {metric:g}, expected 0 to 1"))
    sets: list[dict[str, Any]] = []
    for name, index in stage.sets.items():
        if not isinstance(index, Index):
            sets.append({"name": name, "problem": index})
            continue
        largest = np.argsort(-np.array(index.class_counts, int), kind="stable")[:MAX_ROWS].tolist()
        sets.append({"name": name, "index": index, "labels": largest, "shards": index.shards[:MAX_ROWS]})
        # A subset uses the same tars as its parent data set, so show the parent's path too.
        if index.origin is not None:
            sets[-1]["parent"] = os.path.normpath(index.tables / index.origin.index / "..")
        sets[-1]["source"] = source_of(index)
    overlap = shared_samples(stage.sets)
    seconds = asdict(stage.account)
    # A killed command records no incident, but the next attempt shows that it has ended.
    consequences = [incident.consequence for incident in stage.incidents]
    interruptions = []
    for start in stage.starts[1:]:
        if not any(text.startswith(f"attempt {start['attempt']} ") for text in consequences):
            interruptions.append(start)
    return {
        "stage": stage,
        "not_evaluated": not_evaluated(stage),
        "interruptions": interruptions,
        "charts": drawn,
        "numbers": numbers,
        "evaluations": [row for row in evaluated if row.is_share],
        "losses": {row.step: row.value for row in evaluated if not row.is_share},
        "spikes": album.spikes(stage),
        "predictions": predictions,
        "classes": classes,
        "confusion": confusion,
        "stopped": seconds.pop("stopped"),
        "seconds": seconds,
        "failures": failures,
        "sets": sets,
        "overlap": overlap,
    }


def source_of(index: Index) -> str:
    """Return the folder, file or URL from which the tars of a data set were packed; "" if no record names it."""
    folder = Path(index.directory)
    with suppress(PatchlineError, OSError, ValueError, LookupError, TypeError):
        done = artifacts.read_record(folder.parent / artifacts.DONE)
        config = artifacts.read_record(folder.parent / RECORD)["config"]["sets"][folder.name]
        url = done["sets"][folder.name].get("source")
        return str(url or restored(config, folder)["path"] or config["source"])
    return ""


def shared_samples(sets: Mapping[str, object]) -> str:
    """Compare the sample lists of the first two data sets in the same folder of tars; "" if there are none.

    Samples are compared by their position in the tars. Large data sets are not compared.
    """
    indexes = [(name, index) for name, index in sets.items() if isinstance(index, Index)]
    for (name, index), (other_name, other) in pairwise(indexes):
        if index.directory != other.directory or index.samples + other.samples > MAX_COMPARED:
            continue
        shared = 0
        with suppress(PatchlineError, OSError):
            for number, shard in enumerate(index.shards):
                if shard.name in other.numbers:
                    rows = index.table(number)["image"]
                    shared += len(np.intersect1d(rows, other.table(other.numbers[shard.name])["image"]))
            return f"{name} and {other_name} are in the same tars and share {shared:,} samples"
    return ""


def confusion_of(
    counts_of: Mapping[int, tuple[int, int]],
    mistakes: Sequence[tuple[int, int, int]],
    class_name: Callable[[int], str],
) -> Confusion:
    """Return a confusion matrix, reduced to the classes of the most frequent mistakes.

    `counts_of` has each label's numbers of samples and of correct predictions; `mistakes` has the label, the predicted
    class and the number of such mistakes, the most frequent first.
    """
    samples = {label: count for label, (count, _) in counts_of.items()}
    correct = {label: count for label, (_, count) in counts_of.items()}
    chosen = sorted(samples)
    if len(chosen) > MAX_MATRIX:
        # Both classes of the most frequent mistakes: other classes would leave the matrix almost empty.
        worst: dict[int, None] = {}
        for label, predicted, _ in mistakes:
            if len(worst) < MAX_MATRIX - 1:
                worst |= dict.fromkeys(other for other in (label, predicted) if other in samples)
        chosen = sorted(worst)
    counts: dict[int, dict[int, int]] = {label: {label: correct[label]} for label in chosen}
    pairs: list[tuple[str, str, int, int]] = []
    for label, predicted, times in mistakes:
        if label in counts:
            counts[label][predicted] = times
        if len(pairs) < MAX_PAIRS:
            names = (class_name(label), class_name(predicted))
            pairs.append((*names, times, samples[label]))
    rows = []
    for label in chosen:
        of_columns = [counts[label].get(predicted, 0) for predicted in chosen]
        if len(chosen) < len(samples):
            of_columns.append(samples[label] - sum(of_columns))
        rows.append((class_name(label), samples[label], of_columns))
    return Confusion([class_name(label) for label in chosen], rows, pairs, len(samples))


def loss_of(evaluation: Record) -> float | None:
    """Return the held-out loss in an evaluation's record; None if it has none, as before 2026-11-29."""
    values = evaluation.get("held_out")
    loss = values.get("loss") if isinstance(values, Mapping) else None
    return float(measured(loss)) if isinstance(loss, float) else None


def held_out_loss(stage: StageHistory) -> Line:
    """Return the held-out loss of a stage's evaluations as a curve."""
    points = {}
    for record in stage.of_kind("evaluate"):
        loss = loss_of(record)
        if loss is not None:
            points[record["step"]] = loss
    steps = np.array(sorted(points), int)
    places = np.array([stage.samples_at(step) for step in steps.tolist()], float)
    return Line("held-out", places, np.array([points[step] for step in steps.tolist()], float), steps)


def usage_charts(stage: StageHistory) -> list[Markup]:
    """Return charts of the CPU and GPU use of each worker over time; none if the workers recorded nothing."""
    of_rank: dict[int, list[Mapping[str, Any]]] = {}
    for path in sorted(stage.folder.glob(f"attempts/*/{USAGE_FILES}")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            record = json.loads(path.read_bytes())
            of_rank.setdefault(int(record["rank"]), []).append(record)
    drawn = []
    for title, (name, is_share) in USAGE.items():
        lines: list[Line] = []
        for rank, records in sorted(of_rank.items()):
            x = []
            y = []
            for record in records:
                with suppress(ValueError, LookupError, TypeError):
                    values = measured(record.get(name, []))
                    offset_s = float(record["started"]) - started_s(stage.folder)
                    x.append(offset_s + float(record["interval_s"]) * np.arange(1, len(values) + 1))
                    # A gap separates attempts.
                    x.append(x[-1][-1:])
                    y += [values, np.full(min(len(values), 1), np.nan)]
            if any(map(len, y)):
                lines.append(Line(f"worker {rank}", np.concatenate(x), np.concatenate(y), number=len(lines)))
        if len(lines) > MAX_LINES:
            title += f", {MAX_LINES} of {len(lines)} workers"
        if lines:
            drawn.append(
                charts.line_chart(title, lines[:MAX_LINES], is_share=is_share, axis=charts.TIME, is_from_zero=True)
            )
    return drawn


def not_evaluated(stage: StageHistory) -> str:
    """Return why a stage has no evaluations."""
    config = flat(stage.record.get("config", {}))
    if not config.get("data.evaluate") and not config.get("probe.train"):
        return "None: the recipe names no evaluation set for this stage (data.evaluate or probe.train)."
    return "None yet." if stage.done is None else "None were recorded."


def curves(stage: StageHistory) -> dict[str, list[Line]]:
    """Return a training stage's curves by chart: the final steps, and the steps that an attempt lost in a failure."""
    charted: dict[str, list[Line]] = {}
    reports = np.array(list(map(REPORT_VALUES, stage.kept_reports)), REPORT)
    for field in ("lr", "images_per_s"):
        reports[field] = measured(reports[field])
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


def metrics_of(evaluation: Record) -> dict[str, float]:
    """Return the metrics in an evaluation's record, without the single draws of few-shot probes."""
    metrics = {}
    for name, value in evaluation.items():
        if isinstance(value, float) and name not in ("time", "seconds") and DRAW not in name:
            metrics[name] = value
    return metrics


def evaluations(stage: StageHistory) -> list[EvaluatedMetric]:
    """Return the metrics of a stage's evaluations, with confidence intervals, newest first.

    All metrics are shares: other values are in the list of failures (`stage_values`).
    """
    by_step = {}
    for record in stage.of_kind("evaluate"):
        by_step[record["step"]] = record  # if a step was evaluated twice, use the later record
    rows = []
    for step, record in sorted(by_step.items(), reverse=True):
        for name, value in metrics_of(record).items():
            if not 0 <= value <= 1:
                continue
            row = EvaluatedMetric(step, name, value, low=value, high=value, samples=None, draws=0, deviation=0.0)
            draws = [record[other] for other in record if other.startswith(f"{name}{DRAW}")]
            if name == "accuracy" and "judged" in record:
                low, high = wilson(value, record["judged"])
                row = row._replace(low=low, high=high, samples=record["judged"])
            elif len(draws) > 1:
                row = row._replace(draws=len(draws), deviation=float(np.std(draws, ddof=1)))
            rows.append(row)
        loss = loss_of(record)
        if loss is not None:
            rows.append(EvaluatedMetric(step, "held-out loss", loss, loss, loss, None, 0, 0.0, is_share=False))
    return rows


def document_values(stage: StageHistory, run: RunHistory) -> dict[str, Any]:
    """Return the rows of evaluation.json, the result of an evaluate stage, and a confusion matrix of each data set."""
    rows = []
    matrices = []
    for result in json.loads((stage.folder / "evaluation.json").read_text())["results"]:
        # Only results of the protocol per-class have classes; those from before 2026-11-30 have no confusions.
        if "confusions" in result:
            counts = {}
            names = {}
            for entry in result["classes"]:
                counts[entry["id"]] = (entry["samples"], round(entry["value"] * entry["samples"]))
                names[entry["id"]] = entry["name"]
            confusion = confusion_of(counts, result["confusions"], partial(name_in, names))
            matrices.append((result["set"]["name"], confusion))
        for name, entry in result["values"].items():
            interval = (float(entry["low"]), float(entry["high"]))
            rows.append((result["set"]["name"], name, float(entry["value"]), interval, int(entry["samples"])))
    return {"rows": rows, "matrices": matrices}


def name_in(names: Mapping[int, str | None], label: int) -> str:
    """Return the name of a class; its id if it has none."""
    return names.get(label) or str(label)


def figure_values(stage: StageHistory, run: RunHistory) -> dict[str, Any]:
    """Return the charts and the text of a study's figure."""
    record = artifacts.read_record(stage.folder / "figure.json")
    return {"charts": study_charts(record), "text": (stage.folder / "figure.md").read_text()}


def sweep_values(stage: StageHistory, run: RunHistory) -> dict[str, Any]:
    """Return the table and chart of a sweep, and a chart of the training loss of each run."""
    record = artifacts.read_record(stage.folder / "sweep.json")
    values: dict[str, Any] = {"metric": record["metric"], "chosen": record["chosen"], "rows": []}
    drawn = []
    spread_label = "± between runs"
    names = set()
    lost: dict[str, str] = {}  # row without a value → reason
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
                spread_label = "95 % intervals"
            drawn.append((name, mean["mean"], low, high))
    if drawn:
        title = f"{stage.name}: {record['metric']}, {spread_label}"
        values["chart"] = charts.value_chart(title, drawn[:MAX_ROWS])
    lines: list[Line] = []
    for other in run.stages:
        if other.name in names and other.reports:
            steps = other.steps
            lines.append(Line(other.name, steps.samples_seen, steps.loss, number=len(lines), is_smoothed=True))
    if lines:
        values["losses"] = charts.line_chart("training loss of the runs", lines[:MAX_LINES])
    return values


# Result file of a stage → function that reads it; each result is shown under the stage's name.
RESULTS = {"sweep.json": sweep_values, "figure.json": figure_values, "evaluation.json": document_values}


# ------------------------------------------------------------------------------------------------ several runs


def compare_values(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """Return the variables for compare.html: curves and first differences of the stages shared by the runs."""
    names = names_of(runs)
    compared = []
    single = []
    for name, of_runs in stages_of_runs(runs).items():
        if len(of_runs) > 1:
            compared.append(compare_stage(name, of_runs))
        else:
            single.append((name, *of_runs))
    title = f"{len(runs)} runs"
    if len(runs) <= MAX_PAIRWISE:
        title += f": {', '.join(names.values())}"
    return {
        "title": title,
        "runs": runs,
        "names": names,
        "verdict": verdict,
        "short": short,
        "compared": compared,
        "most_columns": max((len(stage["table"].columns) for stage in compared), default=0),
        "single": single,
    }


def names_of(runs: Sequence[RunHistory]) -> dict[Path, str]:
    """Name runs after their folders; if two names are equal, add parent folders until they differ."""
    names = {run.path: run.name for run in runs}
    levels = 0
    while len(set(names.values())) < len(names) and levels < max(len(run.path.parts) for run in runs):
        levels += 1
        for run in runs:
            parents = run.path.parts[: -1 - run.name.count("/")]  # the name of a stage's folder has its run's name
            names[run.path] = "/".join((*parents[-levels:], run.name))
    return names


def stages_of_runs(runs: Sequence[RunHistory]) -> dict[str, dict[str, StageHistory]]:
    """Return the training stages by name: stage's name → name of the run → stage."""
    names = names_of(runs)
    # If every run has exactly one training stage, compare these even if their names differ.
    have_one_each = all(len(run.trained) == 1 for run in runs)
    shared: dict[str, dict[str, StageHistory]] = {}
    for run in runs:
        for stage in run.trained:
            name = "the only training stage" if have_one_each else stage.name
            # If several folders have the same stage name, use the newest, which is last; the others have older configs.
            shared.setdefault(name, {})[names[run.path]] = stage
    return shared


def short(text: str) -> str:
    """Return the first 12 digits of a sha256 digest, and other text unchanged."""
    return DIGEST.sub(lambda digest: digest[0][:12], text)


def compare_stage(name: str, of_runs: Mapping[str, StageHistory]) -> dict[str, Any]:
    """Return the template variables for a stage of several runs: a table of the runs, their curves, and differences.

    The first run is compared with each of the others, unless there are more than MAX_PAIRWISE of them.
    """
    (base_name, base), *rest = of_runs.items()
    others = []
    marks = []
    for run_name, stage in rest if len(rest) <= MAX_PAIRWISE else []:
        differing = recorded_differences(base, stage)
        first_difference = find_first_difference(base, stage, differing)
        if first_difference.step is not None:
            marks.append(Mark(base.samples_at(first_difference.step), "first difference"))
        # A set that was packed again has many differing tars and classes; the report folds these rows.
        folded = [difference for difference in differing if OF_SET.match(difference.name)]
        listed = [difference for difference in differing if difference not in folded]
        rows_of = {"differences": listed[:MAX_ROWS], "of_sets": folded[:MAX_ROWS]}
        others.append({"name": run_name, **rows_of, "first_difference": first_difference})
    table = runs_table(of_runs)
    return {
        "name": name,
        "base": base_name,
        "others": others,
        "table": table,
        "charts": [curve.drawn() for curve in learning_curves(of_runs, table, marks)],
        "runs": len(of_runs),
    }


class Cell(NamedTuple):
    """A cell in the table of runs; `place` is the row's position if the table is sorted by this column."""

    text: str
    value: Any = None  # what the column is sorted by; None: last
    place: int = 0


class RunsTable(NamedTuple):
    """A row for each run; the columns between the run's name and its state are settings that differ."""

    columns: list[tuple[str, bool]]  # name, whether the cells are numbers
    rows: list[list[Cell]]
    metric: str  # the metric of the first value column; "" if no run was evaluated
    best_first: list[str]  # names of the runs, the best first


def runs_table(of_runs: Mapping[str, StageHistory]) -> RunsTable:
    """Return the table of a stage's runs: settings that differ, final metrics with intervals, samples, time, code."""
    settings = {}
    newest: dict[str, list[EvaluatedMetric]] = {}
    for run_name, stage in of_runs.items():
        settings[run_name] = flat(stage.record.get("config", {}))
        evaluated = evaluations(stage)
        newest[run_name] = [row for row in evaluated if row.step == evaluated[0].step]
    keys = []
    for key in dict.fromkeys(key for config in settings.values() for key in config):
        if len({repr(config.get(key)) for config in settings.values()}) > 1:
            keys.append(key)
    metrics = {row.name: row.is_share for rows in newest.values() for row in rows}
    columns = [("run", False), *((key, False) for key in keys[:MAX_SETTINGS])]
    columns += [(metric, True) for metric in sorted(metrics, key=lambda metric: not metrics[metric])]
    columns += [("training loss", True), ("samples seen", True), ("time", True), ("state", False), ("code", False)]
    rows = []
    for run_name, stage in of_runs.items():
        values = {row.name: row for row in newest[run_name]}
        cells = []
        for column, _ in columns:
            cell = Cell("-")
            if column in values:
                row = values[column]
                # A higher metric and a lower loss are better, and come first.
                if row.is_share:
                    cell = Cell(f"{100 * row.value:.2f} %{interval_text(row)}", -row.value)
                else:
                    cell = Cell(f"{row.value:.4g}", row.value)
            elif column in keys and column in settings[run_name]:
                value = settings[run_name][column]
                cell = Cell(str(value), value if isinstance(value, int | float) else natural(str(value)))
            cells.append(cell)
        last = stage.reports[-1] if stage.reports else {}
        cells[0] = Cell(run_name, natural(run_name))
        at_end = [Cell("-") for _ in range(3)]
        if last:
            at_end = [Cell(f"{last['loss']:.4g}", last["loss"])]
            at_end.append(Cell(f"{last['samples_seen']:,}", last["samples_seen"]))
            at_end.append(Cell(duration(stage.account.wall), stage.account.wall))
        is_done = stage.done is not None
        state = stage.problem or ("done" if is_done else stage.result or "no step yet")
        code = str(stage.task.get("job", {}).get("code") or "-")[:8]
        cells[-5:] = [*at_end, Cell(state, (not is_done, state)), Cell(code, code)]
        rows.append(cells)
    for number in range(len(columns)):
        for place, cells in enumerate(sorted(rows, key=lambda cells: sorting_key(cells[number].value))):
            cells[number] = cells[number]._replace(place=place)
    metric = next((name for name, is_share in metrics.items() if is_share), "")
    places = [name for name, _ in columns]
    best = rows
    if metric:
        best = sorted(rows, key=lambda cells: cells[places.index(metric)].place)
    return RunsTable(columns, rows, metric, [cells[0].text for cells in best])


def sorting_key(value: Any) -> tuple[Any, ...]:
    """Return a key that sorts numbers before texts, and missing and non-finite values last."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return (2,)
    if isinstance(value, int | float):
        return (0, value)
    return (1, value)


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts "run 9" before "run 10"."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", text)
    return tuple((0, int(number), "") if number else (1, 0, other) for number, other in parts)


def interval_text(row: EvaluatedMetric) -> str:
    """Return the 95 % interval or the deviation of a metric, for a table's cell; "" if there is none."""
    if row.samples is not None:
        return f" ({100 * row.low:.1f} to {100 * row.high:.1f})"
    if row.draws > 1:
        return f" ± {100 * row.deviation:.2f}"
    return ""


class LearningCurve(NamedTuple):
    """The content of a chart with a line for each run."""

    title: str
    lines: list[Line]
    marks: Sequence[Mark]
    axis: tuple[str, FuncFormatter]
    is_share: bool

    def drawn(self) -> Markup:
        """Return the chart for a page."""
        # A chart does not label its only curve.
        title = f"{self.title}: {self.lines[0].label}" if len(self.lines) == 1 else self.title
        if self.axis is charts.TIME:
            title += " over time"
        return charts.line_chart(title, self.lines, self.marks, is_share=self.is_share, axis=self.axis)


def learning_curves(
    of_runs: Mapping[str, StageHistory], table: RunsTable, marks: Sequence[Mark]
) -> list[LearningCurve]:
    """Return the curves of the runs: held-out metric and losses over images seen and over time, and the other curves.

    Of many runs, the best MAX_LINES have a line of their own; some of the others are grey.
    """
    names = list(of_runs)
    own = names if len(names) <= MAX_LINES else table.best_first[:MAX_LINES]
    charted: dict[str, list[Line]] = {}
    over_time: dict[str, list[Line]] = {}
    shown = [*own, *[name for name in names if name not in own][:MAX_FADED]]
    for number, name in enumerate(shown):
        stage = of_runs[name]
        of_run: dict[str, Line] = {}
        points = [row for row in reversed(evaluations(stage)) if row.name == table.metric]
        if points:
            steps = np.array([row.step for row in points])
            x = np.array([stage.samples_at(row.step) for row in points])
            value = np.array([row.value for row in points])
            line = Line(name, x, value, steps)
            if len(of_runs) == 1 and all(row.samples for row in points):
                ends = np.array([(row.value - row.low, row.high - row.value) for row in points]).T
                line = line._replace(spread=np.maximum(ends, 0))
            of_run[f"held-out {table.metric}"] = line
        held_out = held_out_loss(stage)
        if len(held_out.x):
            of_run["held-out loss"] = held_out
        for title, of_stage in curves(stage).items():
            of_run[title] = of_stage[0]
        for title, line in of_run.items():
            line = line._replace(label=name, number=number)
            if name not in own:
                label = "other runs" if name == shown[len(own)] else ""
                x, y = charts.thin(line.x, line.y, THIN)
                line = Line(label, x, y, is_faded=True)
            charted.setdefault(title, []).append(line)
            if title in OVER_TIME or title.startswith("held-out"):
                x = seconds_at(stage, np.interp(line.x, stage.steps.samples_seen, stage.steps.step))
                over_time.setdefault(title, []).append(line._replace(x=x))
    of_charts = []
    for title, lines in charted.items():
        is_share = title == f"held-out {table.metric}"
        at = marks if title == "training loss" else ()
        of_charts.append(LearningCurve(title, lines, at, charts.SAMPLES_SEEN, is_share))
        if title in over_time:
            of_charts.append(LearningCurve(title, over_time[title], (), charts.TIME, is_share))
    return of_charts


def seconds_at(stage: StageHistory, steps: np.ndarray) -> np.ndarray:
    """Return the seconds that training took up to each step: with lost steps, without start-up and stops."""
    known = {0.0: 0.0}
    spent = 0.0
    kept = {id(report) for report in stage.kept_reports}
    for report in stage.reports:
        spent += report["seconds"]
        if id(report) in kept:
            known[float(report["step"])] = spent
    # A branch, or a stage whose first records are missing, begins at a later step.
    return np.interp(steps, list(known), list(known.values()))
