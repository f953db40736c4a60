"""A run's page has the numbers of metrics.jsonl, shows names as text, and works in a browser."""

import json
import re
import shutil
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from scipy.stats import binomtest

from data.extras.pages.page import jpeg
from data.extras.shards.packing import pack
from data.extras.shards.subset import Rule
from data.extras.sources.samples import Sample, digits
from data.images.decode import decode
from data.index.document import load_index, write_index
from data.reader import ShardReader
from data.storage import Folder
from jobs.__main__ import main
from jobs.extras.history import RunHistory, read_run
from jobs.extras.report import page, page_watcher
from jobs.extras.report.page import names_of, write_report
from jobs.ownership import Lease
from jobs.run.log import write_status
from pipeline import artifacts
from pipeline.monitoring.telemetry import read_metrics
from tests.support.archives import make_subset
from tests.support.browser import CHROMIUM, Browser
from tests.support.paged_runs import EPOCH, SPIKE, add, change, incident, make_restarted_run, make_run, report, start
from tests.support.recipes import without_check
from tests.support.stores import store

MARKUP = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
# Finds words broken across lines; names and paths may break after a dash or a slash.
BROKEN = """(() => {
    const broken = []
    const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    while (nodes.nextNode()) {
        for (const word of nodes.currentNode.data.matchAll(/[^\\s\\/-]+/g)) {
            const range = document.createRange()
            range.setStart(nodes.currentNode, word.index)
            range.setEnd(nodes.currentNode, word.index + word[0].length)
            const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)))
            if (lines.size > 1 && word[0].length < 33) broken.push(word[0])
        }
    }
    return broken
})()"""
CUT = "[...document.querySelectorAll('.wide')].filter(table => table.scrollWidth > table.clientWidth).length"
CHARTS = "[...document.querySelectorAll('svg')].map(chart => chart.textContent).join(' ')"
ORDER = """[...document.querySelectorAll('.sorted tr:not(.head)')]
    .sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
    .map(row => row.cells[0].textContent.trim()).join(' ')"""
HOSTILE = (MARKUP, "\"quoted' & so", "\u202eflesti", "שלום עולם", "x" * 300)


class Tables(HTMLParser):
    """The text of a page, and of each table cell row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self.is_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "tr", "table", "p", "h2", "h3"):
            self.is_cell = tag == "td"
        if tag == "td":
            self.rows[-1].append("")

    def handle_data(self, text: str) -> None:
        self.text += text
        if self.is_cell:
            self.rows[-1][-1] += text

    def row(self, *first: str) -> list[str]:
        """Return the cells of the row that begins with these texts."""
        rows = [[cell.strip() for cell in row] for row in self.rows]
        (match,) = [row for row in rows if row[: len(first)] == [*first]]
        return match


@pytest.fixture
def restarted(tmp_path: Path, shards: Path) -> Path:
    """Return a run killed at step 24 and resumed from step 16."""
    return make_restarted_run(tmp_path / "run", shards)


def test_the_numbers_of_the_page_equal_those_in_metrics_jsonl(restarted, tmp_path, shards):
    shown = Tables(write_report([restarted], tmp_path / "page.html", with_replay=False).read_text())
    # Read metrics.jsonl independently: a restart discards the steps after its checkpoint.
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    rates: dict[int, float] = {}
    for line in (restarted / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "start":
            for values in (losses, norms, rates):
                for step in [step for step in values if step > record["step"]]:
                    del values[step]
        if record["kind"] == "train":
            rates[record["step"]] = record["lr"]
            for age, loss in enumerate(reversed(record["losses"])):
                losses[record["step"] - age] = loss
                norms[record["step"] - age] = record["grad_norms"][-1 - age]
    curves = {"training loss": losses, "gradient norm of training": norms, "learning rate": rates}
    for name, values in curves.items():
        by_value = sorted(values, key=lambda step: (values[step], step))
        most = min(step for step in values if values[step] == max(values.values()))
        steps = [min(values), max(values), by_value[0], most]
        assert shown.row(name)[1:] == [f"{values[step]!r} (step {step})" for step in steps]
    low, high = binomtest(286, 352).proportion_ci(method="wilson")
    assert shown.row("28", "accuracy")[2:] == ["81.25 %", f"{low:.2%} to {high:.2%}, 352 samples"]
    assert shown.row("28", "5shot")[2:] == ["70.00 %", "± 14.14% over 2 few-shot draws"]
    for text in (
        "attempt 2: random weights, step 16",
        "steps 21 to 22",
        "Spike at step 14: gradient norm 322, normal up to 12",
        "killed by SIGKILL",
        "attempt 2 resumed 1s later with 2 workers",
        "lost steps of attempt 1",
        "3 bad samples were replaced",
    ):
        assert text in shown.text, text
    assert shown.row("1", "not a JPEG") == ["1", "not a JPEG", "train-000001.tar k7"]
    index = json.loads((shards / "train" / "train.index.json").read_text())
    name, samples, size, sha256 = index["shards"][0][:4]
    assert shown.row(name) == [name, f"{samples:,}", f"{size:,}", sha256]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_the_page_without_requests_and_hostile_names_as_text(tmp_path, shards):
    samples = []
    for number, sample in zip(range(20), digits(train=True, image_size=16), strict=False):
        samples.append(Sample(f"k{number}", sample.image, (number % 5,), sample.extension))
    index = pack(samples, tmp_path / "set", name="train", names=HOSTILE)
    folder = make_run(tmp_path / "run", shards)
    change(folder / "task.json", "job", "train", value=[str(tmp_path / "set")])
    change(folder / "stage.json", "name", value=MARKUP)
    examples = []
    for number in range(5):
        example = {"shard": 0, "sample": number, "labels": [number], "predicted": (number + 1) % 5, "confidence": 0.9}
        examples.append(example)
    document = {"step": 24, "set": str(tmp_path / "set"), "samples": examples}
    artifacts.write_record(folder / artifacts.EXAMPLES, document)
    (folder / "incidents.txt").write_text(incident(5, f"worker 0 on {MARKUP}: {HOSTILE[2]}", f"</pre>{MARKUP}"))
    add(folder, {"kind": "evaluate_failed", "step": 8, "error": MARKUP}, SPIKE)
    (folder / "log.txt").write_text(f"bad sample 1 replaced: {MARKUP}: {HOSTILE[1]}\n")
    other = make_run(tmp_path / "other", shards)
    change(other / "stage.json", "config", "loss", value=MARKUP)
    pages = [write_report([folder.parent], tmp_path / "page.html", with_replay=False)]
    # The stages have different names, but each is the only one of its run.
    pages.append(write_report([folder.parent, other.parent], tmp_path / "compared.html"))
    with Browser(tmp_path) as browser:
        for file in pages:
            grounds = set()
            for width, dark in ((400, False), (1000, True), (1800, False)):
                browser.open(file, width=width, dark=dark)
                assert browser.complaints == []
                assert {url[:5] for url in browser.requests} <= {"file:", "data:"}
                assert [url for url in browser.requests if url.startswith("file:")] == [file.as_uri()]
                assert browser.value("document.documentElement.scrollWidth") <= width
                assert browser.value("typeof window.hacked") == "undefined"
                assert browser.value("document.scripts.length + document.querySelectorAll('[onerror]').length") == 0
                assert browser.value("document.querySelectorAll('svg path').length") > 20
                grounds.add(browser.value("getComputedStyle(document.body).backgroundColor"))
                # Text and background differ in colour, also in the charts.
                assert browser.value("getComputedStyle(document.querySelector('svg text')).fill") not in grounds
            assert len(grounds) == 2
            assert MARKUP in browser.value("document.body.textContent")
        browser.open(pages[0])
        text = browser.value("document.body.textContent")
        assert index.digest in text or index.digest[:12] in text
        for name in HOSTILE:
            assert name.replace("\u202e", "\\u202e") in text
        assert "\u202e" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_on_a_phone_no_table_is_cut_and_no_word_is_broken(restarted, tmp_path, shards):
    samples = [{"shard": 0, "sample": 7, "labels": [1], "predicted": 2, "confidence": 0.75}]
    document = {"step": 24, "set": str(shards / "test"), "samples": samples, "classes": [[3, 40, 30, 8, 6]]}
    artifacts.write_record(restarted / artifacts.EXAMPLES, document)
    other = make_run(tmp_path / "another $run$ of a name", shards)
    change(other / "stage.json", "config", "loss", value="softmax")
    pages = [write_report([restarted.parent], tmp_path / "page.html", with_replay=False)]
    pages.append(write_report([restarted.parent, other.parent], tmp_path / "compared.html"))
    with Browser(tmp_path) as browser:
        for file in pages:
            for width in (400, 500):
                browser.open(file, width=width)
                browser.value("document.querySelectorAll('details').forEach(part => part.open = true)")
                assert browser.value("document.documentElement.scrollWidth") <= width
                assert browser.value(BROKEN) == []
                assert browser.value(CUT) == 0
        assert "another $run$ of a name" in browser.value(CHARTS)


def test_a_finished_page_describes_the_training_and_the_accuracy_of_each_class(restarted, tmp_path, shards):
    rows = [[0, 36, 36, -1, 0], [3, 40, 30, 8, 6], [8, 10, 9, 1, 1]]
    document = {"step": 24, "set": str(shards / "test"), "samples": [], "classes": rows}
    artifacts.write_record(restarted / artifacts.EXAMPLES, document)
    shown = Tables(write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text())
    for name, words in (
        ("model", "mu/8, patch 8 × 8, width 32, depth 1, heads 2"),
        ("initial weights", "random"),
        ("image size", "16 × 16 pixels"),
        ("steps", "28 of 28, in batches of 16 images: 448 images seen"),
        ("device", "2 workers on Xeon"),
    ):
        assert shown.row(words) == [words], name
    assert str(restarted.parent) in shown.text
    low, high = binomtest(30, 40).proportion_ci(method="wilson")
    of_class = [f"{low:.2%} to {high:.2%}, of 40 samples", "class 8, 6 of 10 mistakes"]
    assert shown.row("class 3", "75.0 %")[2:] == of_class
    by_class = [row[0].strip() for row in shown.rows if len(row) == 4 and "samples" in row[2]]
    assert by_class[-3:] == ["class 3", "class 8", "class 0"]


def test_a_confusion_matrix_has_the_counts_of_examples_json(restarted, tmp_path, shards):
    index = load_index(shards / "test")
    labels = np.random.default_rng(0).integers(0, 10, 500)
    predicted = np.where(
        np.random.default_rng(1).random(500) < 0.6, labels, np.random.default_rng(2).permutation(labels)
    )
    counts = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    classes = [[label, int((labels == label).sum()), counts[label, label], -1, 0] for label in range(10)]
    mistakes = [[*pair, times] for pair, times in counts.most_common() if pair[0] != pair[1]]
    document = {"step": 24, "set": str(shards / "test"), "samples": [], "classes": classes, "confusions": mistakes}
    artifacts.write_record(restarted / artifacts.EXAMPLES, document)
    text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
    cells = dict(re.findall(r'title="(class \d+ predicted as class \d+): (\d+) of \d+"', text))
    assert len(cells) == 100
    for label in range(10):
        for other in range(10):
            name = f"{index.class_name(label)} predicted as {index.class_name(other)}"
            assert int(cells[name]) == counts[label, other], name
    first = mistakes[0]
    share = f"{100 * first[2] / classes[first[0]][1]:.1f} %"
    names = [index.class_name(first[0]), index.class_name(first[1])]
    assert Tables(text).row(*names) == [*names, f"{first[2]} of {classes[first[0]][1]}", share]


def test_of_many_classes_the_matrix_shows_the_most_confused():
    # Class n has 2,000 samples and n mistakes, all of them predicted as class 0.
    counts = {label: (2000, 2000 - label) for label in range(1000)}
    mistakes = [[label, 0, label] for label in range(999, 0, -1)]
    shown = page.confusion_of(counts, mistakes, "c{}".format)
    assert shown.columns == ["c0", *(f"c{label}" for label in range(982, 1000))]
    assert shown.rows[-1] == ("c999", 2000, [999, *[0] * 17, 1001, 0])
    assert shown.rows[0] == ("c0", 2000, [2000, *[0] * 19])
    assert shown.pairs[0] == ("c999", "c0", 999, 2000)
    assert (len(shown.pairs), shown.classes) == (page.MAX_PAIRS, 1000)


def test_the_held_out_loss_stands_next_to_the_accuracy(restarted, tmp_path):
    for step, loss in ((8, 1.75), (28, 0.625)):
        values = {"accuracy": 0.5, "judged": 100, "held_out": {"loss": loss}}
        add(restarted, {"kind": "evaluate", "step": step, **values})
    text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
    assert Tables(text).row("28", "accuracy")[-1] == "0.625"
    assert Tables(text).row("8", "accuracy")[-1] == "1.75"
    assert 'aria-label="held-out loss"' in text


def test_values_on_hover_equal_the_losses_in_metrics_jsonl(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)
    text = write_report([tmp_path / "run"], tmp_path / "page.html", with_replay=False).read_text()
    chart = text[text.index('aria-label="training loss"') :].split("</svg>")[0]
    shown = re.findall(r">step (\d+), (\d+) samples seen</tspan><tspan [^>]*>([^<]+)<", chart)
    losses = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        losses += json.loads(line).get("losses", [])
    assert [(int(step), int(samples), value) for step, samples, value in shown] == [
        (step, 16 * step, f"{loss:.4g}") for step, loss in enumerate(losses, 1)
    ]


@pytest.mark.filterwarnings("error")  # numbers are checked when they are read
def test_hostile_numbers_and_names_do_not_break_a_page(restarted, tmp_path, shards):
    for loss in (float("nan"), float("inf"), 1e308, MARKUP, [1]):
        add(restarted, {"kind": "evaluate", "step": 28, "accuracy": loss, "judged": 3, "held_out": {"loss": loss}})
        text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
        assert "<h3>Wall time" in text
        assert MARKUP not in text
    for value in ("nan", "inf", "1e+308"):
        assert f"step 28: evaluation: accuracy is {value}, expected 0 to 1" in text
    usage = restarted / "attempts" / "attempt-000001" / "rank-00000.usage.json"
    for content in (
        "{torn",
        '{"rank": 0, "cores": ["x"]}',
        '{"rank": 0, "cores": [1e308]}',
        f'{{"rank": "{MARKUP}", "cores": [1]}}',
        "[]",
    ):
        usage.write_text(content)
        text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
        assert MARKUP not in text
        assert "CPU cores in use" not in text


def test_the_use_of_each_worker_is_drawn(restarted, tmp_path):
    for rank, cores in ((0, [0.5, 1.5]), (1, [0.25, 0.75])):
        record = {"rank": rank, "started": EPOCH, "interval_s": 1.0, "cores": cores, "memory_gb": [1.0, 1.0]}
        (restarted / "attempts" / "attempt-000001" / f"rank-0000{rank}.usage.json").write_text(json.dumps(record))
    text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
    chart = text[text.index('aria-label="CPU cores in use"') :].split("</svg>")[0]
    assert re.findall(r"worker 0 ([\d.]+)</tspan><tspan [^>]*>worker 1 ([\d.]+)<", chart) == [
        ("0.5", "0.25"),
        ("1.5", "0.75"),
    ]
    assert "GPU utilisation" not in text


def test_the_table_of_twenty_runs_has_the_numbers_of_their_files(tmp_path, shards):
    expected = {}
    for number in range(20):
        folder = make_run(tmp_path / f"run-{number}", shards, losses=[3 - number / 10] * 24)
        change(folder / "stage.json", "config", "optim", "lr", value=0.001 * (number + 1))
        correct = 50 + 37 * number % 40
        add(folder, {"kind": "evaluate", "step": 24, "accuracy": correct / 100, "judged": 100})
        low, high = binomtest(correct, 100).proportion_ci(method="wilson")
        expected[f"run-{number}"] = [
            str(0.001 * (number + 1)),
            f"{correct:.2f} % ({100 * low:.1f} to {100 * high:.1f})",
            f"{3 - number / 10:.4g}",
            "384",
        ]
    paths = sorted(tmp_path.glob("run-*[0-9]"))
    text = write_report(paths, tmp_path / "page.html").read_text()
    shown = Tables(text)
    for name, cells in expected.items():
        assert shown.row(name)[1:5] == cells, name
    headers = re.findall(r'<input type="radio" name="sort-1" value="\d+">&nbsp;([^<]+)<', text)
    assert headers == ["run", "optim.lr", "accuracy", "training loss", "samples seen", "time", "state", "code"]
    # The places of the rows in the column accuracy: the highest first; in the column of names, run-2 before run-10.
    places = re.findall(r"<tr style=\"--given: \d+; --r0: (\d+); --r1: \d+; --r2: (\d+)[^>]*>\s*<td>(run-\d+)", text)
    assert len(places) == 20
    for by_name, _, name in places:
        assert by_name == name.removeprefix("run-")
    accuracies = {name: float(cells[1].split()[0]) for name, cells in expected.items()}
    in_order = [accuracies[name] for _, _, name in sorted(places, key=lambda row: int(row[1]))]
    assert in_order == sorted(accuracies.values(), reverse=True)
    assert "other runs" in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_in_a_browser_a_click_sorts_the_runs_and_the_mouse_shows_values(tmp_path, shards):
    for number in range(3):
        folder = make_run(tmp_path / f"run-{number}", shards)
        change(folder / "stage.json", "config", "optim", "lr", value=[0.2, 0.1, 0.3][number])
    file = write_report([tmp_path / f"run-{number}" for number in range(3)], tmp_path / "page.html")
    with Browser(tmp_path) as browser:
        for width in (400, 1200):
            browser.open(file, width=width)
            assert browser.value(ORDER) == "run-0 run-1 run-2"
            browser.value("document.querySelector('.sorted th input[value=\"1\"]').click()")
            assert browser.value(ORDER) == "run-1 run-0 run-2"
            browser.value("document.querySelector('.sorted .reversed').click()")
            assert browser.value(ORDER) == "run-2 run-0 run-1"
        place = browser.value(
            "(() => { const box = document.querySelectorAll('.tip')[5].querySelector('rect').getBoundingClientRect();"
            "window.scrollTo(0, box.top - 100);"
            "const at = document.querySelectorAll('.tip')[5].querySelector('rect').getBoundingClientRect();"
            "return [at.left + at.width / 2, at.top + at.height / 2] })()"
        )
        visible = "[...document.querySelectorAll('.tip text')].filter(e => getComputedStyle(e).visibility == 'visible')"
        assert browser.value(f"{visible}.length") == 0
        browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        assert browser.value(f"{visible}.map(e => e.textContent).join()").startswith("step 6, 96 samples seenrun-0 ")


@pytest.mark.slow
def test_a_page_of_a_million_steps_is_small_and_keeps_outliers(tmp_path, shards, capsys):
    folder = make_run(tmp_path / "run", shards)
    random = np.random.default_rng(0)
    losses = np.round(2 + random.random(1_000_000), 6)
    losses[654_321] = 77.5
    losses[123_456] = 0.25
    with open(folder / "metrics.jsonl", "w") as file:
        file.write(json.dumps(start(1, 0)) + "\n")
        for last in range(100, 1_000_001, 100):
            record = report(1, last, 1_000_000, losses[last - 100 : last].tolist(), "e" * 64)
            file.write(json.dumps(record) + "\n")
            if last % 10_000 == 0:
                record = {"kind": "evaluate", "attempt": 1, "time": record["time"], "step": last}
                file.write(json.dumps({**record, "accuracy": 0.5, "judged": 1000}) + "\n")
    began = time.process_time()
    text = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    with capsys.disabled():
        print(f"\n1,000,000 steps: {len(text.encode()):,} bytes in {time.process_time() - began:.2f} s of CPU")
    assert len(text.encode()) < 2_000_000
    row = Tables(text).row("training loss")
    assert row[3:] == ["0.25 (step 123,457)", "77.5 (step 654,322)"]


def test_the_verdict_is_about_the_stage_that_was_started_last(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)
    record = artifacts.read_record(folder / "stage.json")
    artifacts.write_record(folder / "stage.json", {**record, "resumed": record["started"] + 20})
    other = tmp_path / "run" / "pretrain-00000000"
    other.mkdir()
    times = {"started": record["started"] + 10, "resumed": record["started"] + 10}
    artifacts.write_record(other / "stage.json", {**record, **times, "name": "abandoned"})
    write_status(tmp_path / "run", 75, "stopped", "python -m jobs run tiny.yaml")
    assert "pretrain at step 24 of 24" in page.verdict(read_run(tmp_path / "run"))


def test_the_verdict_gives_the_state_of_the_run_and_the_reason_for_waiting(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)

    def verdict() -> str:
        return page.verdict(read_run(tmp_path / "run"))

    write_status(tmp_path / "run", 75, "stopped at step 24 after committing it", "python -m jobs run x")
    assert "Stopped: stopped at step 24 after committing it (exit 75" in verdict()
    write_status(tmp_path / "run", None, "running", "python -m jobs run x")
    add(folder, report(1, 25, 50, [1.25], "0" * 64))
    assert re.match(r"Running since .*: pretrain at step 25 of 50, loss 1.25, 25s left\.$", verdict())
    (folder / "attempts" / "attempt-000002").mkdir()
    (folder / "log.txt").write_text("step 25\n[driver] waiting for 2 GPUs\n")
    assert verdict().endswith("waiting for its workers to start: waiting for 2 GPUs.")
    with open(folder / "log.txt", "a") as log:
        log.write("[driver] pretrain: key 1a2b3c4d, in runs/run/pretrain-1a2b3c4d\n")
    assert verdict().endswith("waiting for its workers to start.")
    lease = Lease(Folder(tmp_path / "run"), print)
    lease.record["pid"] = 2**22 + 1  # larger than any real pid: as if the process had been killed
    lease.take()
    assert "Stopped: killed, or its machine was lost" in verdict()
    artifacts.write_record(folder / "done.json", {"seconds": 3.0, "metrics": {"accuracy": 0.5}})
    assert verdict() == "Done. pretrain accuracy 50.00%"


def test_attempts_without_a_recorded_incident_and_stages_without_a_set_are_explained(restarted, tmp_path):
    add(restarted, start(3, 28))
    history = read_run(tmp_path / "run").trained[0]
    values = page.stage_values(history, page.Album(with_replay=False))
    assert [record["attempt"] for record in values["interruptions"]] == [3], "attempt 2 followed an incident"
    history.record["config"] |= {"data": {}, "probe": {}}
    assert "names no evaluation set" in page.not_evaluated(history)
    assert "The command before attempt 3 was stopped or killed." in (
        write_report([tmp_path / "run"], tmp_path / "page.html", with_replay=False).read_text()
    )


def test_notices_are_among_the_incidents(restarted):
    notice = "worker 3 on n1 takes 1.18 times as long as the others"
    add(restarted, {"kind": "slow", "step": 24, "about": "worker 3", "notice": notice, "is_over": False})
    (history,) = read_run(restarted.parent).trained
    assert (24, "slow", notice) in page.stage_values(history, page.Album(with_replay=False))["failures"]


def test_digests_are_shortened():
    assert page.short(f"{'ab' * 32} and {'12' * 8}") == f"{'ab' * 6} and {'12' * 8}"


def test_the_source_of_a_packed_set_and_of_its_parts_is_shown_with_shared_samples(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)
    packed = tmp_path / "run" / "shards-1a2b3c4d"
    shutil.copytree(shards / "train", packed / "train")
    config = {"sets": {"train": {"source": "folder", "path": "photos/sorted"}}}
    artifacts.write_record(packed / "stage.json", {"config": config})
    artifacts.write_record(packed / "done.json", {"seconds": 1.0, "sets": {"train": {"samples": 1442}}})
    whole = load_index(packed / "train")
    parts = tmp_path / "run" / "parts-1a2b3c4d"
    # The halves overlap in a fifth of the samples.
    for name, part in (("train", ":60%"), ("held-out", "40%:")):
        make_subset(whole, parts / name, Rule(part=part, seed=0), name=name)
    change(folder / "task.json", "job", "train", value=[str(parts / "train")])
    change(folder / "task.json", "job", "evaluate", value=str(parts / "held-out"))
    shown = Tables(write_report([tmp_path / "run"], tmp_path / "page.html", with_replay=False).read_text())
    for name in ("train", "evaluation"):
        assert " ".join(shown.row(name)[4].split()).endswith("packed from photos/sorted")
    samples = [load_index(parts / name).samples for name in ("train", "held-out")]
    assert f"share {sum(samples) - 1442:,} samples" in shown.text


def test_two_parts_of_a_set_are_shown_with_their_folders_rules_and_samples(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)
    whole = load_index(shards / "train")
    parts = tmp_path / "run" / "parts-1a2b3c4d"
    for name, part in (("train", ":80%"), ("held-out", "80%:")):
        make_subset(whole, parts / name, Rule(part=part, seed=0), name=name)
    change(folder / "task.json", "job", "train", value=[str(parts / "train")])
    change(folder / "task.json", "job", "evaluate", value=str(parts / "held-out"))
    shown = Tables(write_report([tmp_path / "run"], tmp_path / "page.html", with_replay=False).read_text())
    samples = []
    for name, part, of_run in (("train", ":80%", "train"), ("evaluation", "80%:", "held-out")):
        of_set = [" ".join(cell.split()) for cell in shown.row(name)]
        samples.append(int(of_set[1].replace(",", "")))
        assert of_set[2:4] == ["10", f"parts-1a2b3c4d/{of_run}"]
        assert of_set[4].startswith(f"part {part}, seed 0 of {shards / 'train'}, in 15 tars, ")
    assert "train and evaluate are in the same tars and share 0 samples" in shown.text
    # A fifth of each of the ten classes of digits is held out.
    assert sum(samples) == 1442
    assert abs(samples[1] - 1442 / 5) <= 10


@pytest.mark.parametrize("name", ["stage.json", "task.json", "metrics.jsonl", artifacts.EXAMPLES, "incidents.txt"])
def test_a_modified_file_is_named_and_only_its_part_of_the_page_is_missing(restarted, tmp_path, name):
    (restarted / name).write_text('{"kind": "train"}\n' if name == "metrics.jsonl" else "2026-99-99 99:99:99 {torn\n")
    text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
    assert "UNREADABLE" in text or "cannot be shown" in text


def test_a_run_and_a_set_in_a_store_are_shown_like_local_ones(tmp_path, shards, monkeypatch, capsys):
    """Run and set are in S3: the page shows images of the evaluation set, and no temporary path."""
    folder = make_run(tmp_path / "local", shards)
    shutil.copytree(shards / "test", tmp_path / "index")
    for tar in (tmp_path / "index").glob("*.tar"):
        tar.unlink()
    index = load_index(shards / "test")
    write_index(tmp_path / "index" / "test.index.json", "s3://images/set", index.shards, index.class_counts)
    samples = [{"shard": 0, "sample": 7, "labels": [1], "predicted": 2, "confidence": 0.75}]
    artifacts.write_record(
        folder / artifacts.EXAMPLES, {"step": 24, "set": str(tmp_path / "index"), "samples": samples}
    )
    (folder / "log.txt").write_text("bad sample 1 replaced: train-000001.tar k7: not a JPEG\n")
    write_status(tmp_path / "local", None, "running", "python -m jobs run x")
    files = {f"set/{tar.name}": tar for tar in (shards / "test").glob("*.tar")}
    for file in (tmp_path / "local").rglob("*.*"):
        files[f"runs/stored/{file.relative_to(tmp_path / 'local')}"] = file
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    with store("s3", files):
        assert main(["report", "s3://images/runs/stored", "--output", str(tmp_path / "page.html")]) == 0
        during_run = write_report([tmp_path / "local"], tmp_path / "during.html", with_replay=False).read_text()
    text = (tmp_path / "page.html").read_text()
    pixels = decode(ShardReader(index).read(0, 7)[1])
    assert str(jpeg(pixels)) in text
    assert str(jpeg(pixels)) not in during_run
    assert "the images are in an object store; to show them, run python -m jobs report " in during_run
    assert "patchline-run-" not in text, "the temporary copy no longer exists when the page is read"
    assert "not a JPEG" in text
    assert "Running since" in text


def test_sweeps_evaluations_and_analyses_are_shown(restarted, tmp_path):
    folders = {name: restarted.parent / f"{name}-1a2b3c4d" for name in ("grid", "evaluate", "figures")}
    for name in ("grid", "evaluate"):
        folders[name].mkdir()
        artifacts.write_record(folders[name] / "stage.json", {"name": name, "config": {}})
    mean = {"mean": 0.9123, "sd": 0.0045, "runs": 3, "interval": [0.9012, 0.9234]}
    rows = {"optim.lr=0.01": {"accuracy": mean}, "optim.lr=0.3": {}}
    record = {
        "metric": "accuracy",
        "rows": rows,
        "means": {},
        "chosen": {"optim.lr": 0.01},
        "runs": [{"stage": "pretrain", "row": "optim.lr=0.3", "diverged": "not finite"}],
    }
    artifacts.write_record(folders["grid"] / "sweep.json", record)
    value = {"value": 0.8765, "low": 0.85, "high": 0.9, "samples": 1234}
    per_class = {
        "set": {"name": "held-out"},
        "values": {},
        "classes": [
            {"id": 0, "name": "cat", "value": 2 / 3, "samples": 3},
            {"id": 4, "name": None, "value": 0.25, "samples": 4},
        ],
        "confusions": [[4, 0, 3], [0, 4, 1]],
    }
    document = {"results": [{"set": {"name": "test"}, "values": {"top-1": value}}, per_class]}
    (folders["evaluate"] / "evaluation.json").write_text(json.dumps(document))
    folders["figures"].mkdir()
    (folders["figures"] / "analysis.json").write_text('{"weights": "runs/digits/finetune", "images": ["a", "b"]}')
    for name in ("attention.png", "inside.png"):
        picture = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8)
        (folders["figures"] / name).write_bytes(cv2.imencode(".png", picture)[1].tobytes())
    text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
    shown = Tables(text)
    assert shown.row("optim.lr=0.01") == ["optim.lr=0.01", "91.23%", "90.12% to 92.34%", "± 0.45%", "3"]
    assert shown.row("optim.lr=0.3")[1] == "diverged"
    assert "Chosen: optim.lr=0.01" in shown.text
    assert 'aria-label="grid: accuracy, 95 % intervals"' in text
    assert 'aria-label="training loss of the runs"' in text
    assert shown.row("test", "top-1")[2:] == ["87.65%", "85.00% to 90.00%", "1,234"]
    assert "Confusion matrix of held-out" in shown.text
    for cell in ("cat predicted as cat: 2 of 3", "cat predicted as 4: 1 of 3", "4 predicted as cat: 3 of 4"):
        assert f'title="{cell}"' in text
    assert shown.row("4", "cat") == ["4", "cat", "3 of 4", "75.0 %"]
    assert "runs/digits/finetune, 2 images" in shown.text
    assert 'alt="attention.png"' in text
    assert 'alt="inside.png"' in text


RECIPE = without_check("""
run: {run}
cluster: {{workers: 1, backend: processes}}
pretrain:
  data: {{train: {shards}/train, evaluate: {shards}/test}}
  model: {{name: mu/8, width: 16, depth: 1, mlp: 32, heads: 2, image_size: 16, classes: 10}}
  optim: {{lr: {lr}, schedule: {{warmup_steps: 2}}}}
  loss: softmax
  steps: 6
  batch_size: 16
  micro_batch: 16
  precision: fp32
  zero: 0
  log_every: 1
""")


def run(folder: Path, shards: Path, lr: float) -> Path:
    """Train six steps; return the run directory."""
    recipe = folder / f"lr-{lr}.yaml"
    recipe.write_text(RECIPE.format(run=folder / f"lr-{lr}", shards=shards, lr=lr))
    assert main(["run", str(recipe)]) == 0
    return folder / f"lr-{lr}"


def test_a_run_updates_its_page_and_a_comparison_finds_the_first_different_step(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.delenv(page_watcher.SWITCH)
    first = run(tmp_path, shards, 0.01)
    assert f"page: {first / 'report.html'}" in capsys.readouterr().out
    shown = Tables((first / "report.html").read_text())
    assert "Done. pretrain accuracy" in shown.text
    assert "most confident errors first" in shown.text
    (folder,) = first.glob("pretrain-*")

    # The predictions equal those of the exported weights, computed by a plain forward pass.
    import torch

    import models
    from data.order import Order

    weights, config = models.load_weights(folder)
    model = models.from_config(config)
    model.load_state_dict(weights)
    reader = ShardReader(load_index(shards / "test"))
    record = json.loads((folder / artifacts.EXAMPLES).read_text())
    examples = record["samples"]
    confusion = np.zeros((10, 10), int)
    outputs = {}
    for number, shard in enumerate(reader.index.shards):
        for sample in range(shard.samples):
            _, image, label = reader.read(number, sample)
            pixels = torch.from_numpy(decode(image)).permute(2, 0, 1)[None] / 127.5 - 1
            with torch.no_grad():
                output = model.eval()(pixels).softmax(1)[0]
            confusion[int(label), int(output.argmax())] += 1
            outputs[number, sample] = (int(label), output)
    for example in examples:
        label, output = outputs[example["shard"], example["sample"]]
        assert example["labels"] == [label]
        assert example["predicted"] == int(output.argmax())
        assert example["confidence"] == pytest.approx(float(output.max()), abs=1e-5)
    # The counts per class too: samples, correct predictions, and the most frequent wrong prediction.
    for label, samples, right, other, times in record["classes"]:
        mistakes = confusion[label].copy()
        mistakes[label] = 0
        assert [samples, right, times] == [confusion[label].sum(), confusion[label, label], mistakes.max()]
        assert other == (mistakes.argmax() if times else -1)
    assert len(record["classes"]) == 10
    assert len(record["confusions"]) == np.count_nonzero(confusion) - np.count_nonzero(confusion.diagonal())
    for label, other, times in record["confusions"]:
        assert times == confusion[label, other]
    losses = [-float(output[label].log()) for label, output in outputs.values()]
    (evaluated,) = read_metrics(folder, "evaluate")
    assert evaluated["held_out"]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    is_wrong = [example["predicted"] not in example["labels"] for example in examples]
    mistakes = [example["confidence"] for example in examples if example["predicted"] not in example["labels"]]
    hits = [example["confidence"] for example in examples if example["predicted"] in example["labels"]]
    assert is_wrong == sorted(is_wrong, reverse=True)
    assert mistakes == sorted(mistakes, reverse=True)
    assert hits == sorted(hits, reverse=True)
    assert len(examples) == 32
    assert 0 < len(mistakes) <= 24

    # The batch of a spike is the batch in the sample order.
    add(folder, {**SPIKE, "step": 5})
    spiked = write_report([first], tmp_path / "spiked.html").read_text()
    index = load_index(shards / "train")
    _, shard, sample = Order(index.shard_samples, seed=0, batch_size=16).batch(4)
    places = [f"{index.shards[a].name}, {b}" for a, b in zip(shard.tolist(), sample.tolist(), strict=True)]
    assert re.findall(r">(train-\d+\.tar, \d+)<", spiked) == places

    # If a page cannot be written, the run logs one line.
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(page, "write_report", fail)
    second = run(tmp_path, shards, 0.02)
    assert "report.html: RuntimeError: no ink" in capsys.readouterr().out
    assert not (second / "report.html").exists()
    monkeypatch.undo()

    compared = Tables(write_report([first, second], tmp_path / "both.html").read_text())
    # The warm-up begins with a learning rate of 0 in both runs, so the first different update is that of step 2.
    assert "first differ at step 3: loss" in compared.text
    assert compared.row("config", "optim.lr")[2:4] == ["0.01", "0.02"]
    assert re.search(r"Most likely cause:\s+config, optim.lr\s+\(0.01 → 0.02\)", compared.text)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/runs/x", "/a/runs/y"], ["x", "y"]),
        (["/a/x", "/b/x"], ["a/x", "b/x"]),
        (["/a/runs/x", "/b/runs/x", "/b/runs/y"], ["a/runs/x", "b/runs/x", "b/runs/y"]),
        (["/a/x/fit-1", "/b/x/fit-1"], ["a/x/fit-1", "b/x/fit-1"]),
    ],
)
def test_runs_whose_folders_have_equal_names_are_all_compared(paths, names):
    """Before, two runs named runs/x in different folders were one run of the comparison."""
    runs = []
    for path in map(Path, paths):
        name = path.name if "fit" not in path.name else f"{path.parent.name}/{path.name}"
        runs.append(RunHistory(path, name, str(path), [], "done", "", ""))
    assert list(names_of(runs).values()) == names
