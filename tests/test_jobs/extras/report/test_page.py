"""A run's page: its numbers are those of metrics.jsonl, names stay text, and a browser finds nothing to complain of."""

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from scipy.stats import binomtest

from data.extras.pages.page import jpeg
from data.images.decode import decode
from data.index.document import load_index, write_index
from data.shards.packing import pack
from data.shards.reader import ShardReader
from data.shards.subset import Rule
from data.sources.samples import Sample, digits
from data.storage import Folder
from jobs.__main__ import main
from jobs.extras.history import read_run
from jobs.extras.report import page, page_watcher
from jobs.extras.report.page import write_report
from jobs.ownership import Lease
from jobs.run.log import write_status
from pipeline import artifacts
from tests.support.archives import make_subset
from tests.support.browser import CHROMIUM, Browser
from tests.support.paged_runs import add, change, incident, make_run, report, start
from tests.support.stores import store

MARKUP = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
# Words of a page that go on in the next line; names and paths may break behind a dash or a stroke.
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
HOSTILE = (MARKUP, "\"quoted' & so", "\u202eflesti", "שלום עולם", "x" * 300)
SPIKE = {"kind": "spike", "step": 14, "grad_norm": 321.5, "limit": 12.0, "ids": [[0, 0, 1]]}
SPIKE["recent"] = [{"step": 14, "loss": 9.5, "grad_norm": 321.5, "ledger": "0" * 12}]


class Tables(HTMLParser):
    """The text of every cell of a page, row by row, and of everything else."""

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
        """The cells of the row that begins with these."""
        rows = [[cell.strip() for cell in row] for row in self.rows]
        (match,) = [row for row in rows if row[: len(first)] == [*first]]
        return match


@pytest.fixture
def restarted(tmp_path: Path, shards: Path) -> Path:
    """A run that was killed at step 24 and took the steps from 17 on again; with whatever a page can show."""
    folder = make_run(tmp_path / "run", shards)
    second = [start(2, 16), report(2, 20, 28, [1.0, 0.75, 0.5, 0.625], "a" * 64)]
    second += [report(2, 28, 28, [0.4] * 8, "b" * 64)]
    add(folder, SPIKE, *second)
    add(folder, {"kind": "evaluate", "step": 8, "accuracy": 0.5, "judged": 100, "seconds": 1.5})
    values = {"accuracy": 0.8125, "judged": 352, "5shot": 0.7, "5shot-seed-0": 0.6, "5shot-seed-1": 0.8}
    add(folder, {"kind": "evaluate", "step": 28, **values})
    (folder / "incidents.txt").write_text(incident(15, "worker 1 on n7, in backward of step 24: killed by SIGKILL"))
    (folder / "log.txt").write_text("[worker 1] bad sample 1 replaced: train-000001.tar k7: not a JPEG\n")
    artifacts.write_record(folder / artifacts.EXCLUDED_STEPS, {"stretches": [[20, 22]]})
    return folder


def test_the_numbers_of_the_page_are_those_of_metrics_jsonl(restarted, tmp_path, shards):
    shown = Tables(write_report([restarted], tmp_path / "page.html", with_replay=False).read_text())
    # An independent reading: the newest report that holds a step is the one whose weights went on.
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    rates: dict[int, float] = {}
    for line in (restarted / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "start":
            for kept_values in (losses, norms, rates):
                for step in [step for step in kept_values if step > record["step"]]:
                    del kept_values[step]
        if record["kind"] == "train":
            rates[record["step"]] = record["lr"]
            for behind, loss in enumerate(reversed(record["losses"])):
                losses[record["step"] - behind] = loss
                norms[record["step"] - behind] = record["grad_norms"][-1 - behind]
    curves = {"training loss": losses, "gradient norm of training": norms, "learning rate": rates}
    for name, values in curves.items():
        by_value = sorted(values, key=lambda step: (values[step], step))
        most = min(step for step in values if values[step] == max(values.values()))
        steps = [min(values), max(values), by_value[0], most]
        assert shown.row(name)[1:] == [f"{values[step]!r} (step {step})" for step in steps]
    low, high = binomtest(286, 352).proportion_ci(method="wilson")
    assert shown.row("28", "accuracy")[2:] == ["81.25 %", f"{low:.2%} to {high:.2%}, of 352 samples"]
    assert shown.row("28", "5shot")[2:] == ["70.00 %", "± 14.14% between 2 draws of the shots"]
    for said in (
        "attempt 2: random weights, step 16",
        "steps 21 to 22",
        "Spike at step 14: gradient norm 322, usual up to 12",
        "killed by SIGKILL",
        "attempt 2 went on 1s later with 2 workers",
        "lost steps of attempt 1",
        "3 bad samples were replaced",
    ):
        assert said in shown.text, said
    assert shown.row("1", "not a JPEG") == ["1", "not a JPEG", "train-000001.tar k7"]
    index = json.loads((shards / "train" / "train.index.json").read_text())
    name, samples, size, sha256 = index["shards"][0][:4]
    assert shown.row(name) == [name, f"{samples:,}", f"{size:,}", sha256]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_the_page_without_a_request_and_hostile_names_as_text(tmp_path, shards):
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
    # The stages are called otherwise, and are the only ones of their runs.
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
                # What is written is not what it is written on, in the charts too.
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
                assert browser.value(BROKEN) == [] and browser.value(CUT) == 0
        assert "another $run$ of a name" in browser.value("document.querySelector('svg').textContent")


def test_a_finished_page_says_what_was_trained_and_how_well_each_class_is_known(restarted, tmp_path, shards):
    rows = [[0, 36, 36, -1, 0], [3, 40, 30, 8, 6], [8, 10, 9, 1, 1]]
    document = {"step": 24, "set": str(shards / "test"), "samples": [], "classes": rows}
    artifacts.write_record(restarted / artifacts.EXAMPLES, document)
    shown = Tables(write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text())
    for name, words in (
        ("model", "mu/8, patch 8 × 8, width 32, depth 1, heads 2"),
        ("first weights", "random"),
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


def test_a_page_of_a_million_steps_is_small_and_keeps_what_stands_out(tmp_path, shards, capsys):
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


def test_the_verdict_says_how_the_run_stands_and_what_it_waits_for(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)

    def verdict() -> str:
        return page.verdict(read_run(tmp_path / "run"))

    write_status(tmp_path / "run", 75, "stopped at step 24 after committing it", "python -m jobs run x")
    assert "Stopped: stopped at step 24 after committing it (exit 75" in verdict()
    write_status(tmp_path / "run", None, "running", "python -m jobs run x")
    add(folder, report(1, 25, 50, [1.25], "0" * 64))
    assert re.match(r"Running since .*: pretrain at step 25 of 50, loss 1.25, 25s to go\.$", verdict())
    (folder / "attempts" / "attempt-000002").mkdir()
    (folder / "log.txt").write_text("step 25\n[driver] waiting for 2 GPUs\n")
    assert verdict().endswith("it waits for its workers to start: waiting for 2 GPUs.")
    with open(folder / "log.txt", "a") as log:
        log.write("[driver] pretrain: key 1a2b3c4d, in runs/run/pretrain-1a2b3c4d\n")
    assert verdict().endswith("it waits for its workers to start.")
    lease = Lease(Folder(tmp_path / "run"), print)
    lease.record["pid"] = 2**22 + 1  # above any real one: its process was killed
    lease.take()
    assert "Stopped: killed, or lost with its machine" in verdict()
    artifacts.write_record(folder / "done.json", {"seconds": 3.0, "metrics": {"accuracy": 0.5}})
    assert verdict() == "Done. pretrain accuracy 50.00%"


def test_two_parts_of_a_set_are_told_apart_by_their_folders_rules_and_samples(tmp_path, shards):
    folder = make_run(tmp_path / "run", shards)
    whole = load_index(shards / "train")
    parts = tmp_path / "run" / "parts-1a2b3c4d"
    for name, part in (("train", ":80%"), ("held-out", "80%:")):
        make_subset(whole, parts / name, Rule(part=part, seed=0), name=name)
    change(folder / "task.json", "job", "train", value=[str(parts / "train")])
    change(folder / "task.json", "job", "evaluate", value=str(parts / "held-out"))
    shown = Tables(write_report([tmp_path / "run"], tmp_path / "page.html", with_replay=False).read_text())
    samples = []
    for name, part, of_run in (("train", ":80%", "train"), ("evaluate on", "80%:", "held-out")):
        of_set = [" ".join(cell.split()) for cell in shown.row(name)]
        samples.append(int(of_set[1].replace(",", "")))
        assert of_set[2:4] == ["10", f"parts-1a2b3c4d/{of_run}"]
        assert of_set[4].startswith(f"part {part}, seed 0 of {shards / 'train'}, in its 15 tars of ")
    # All digits, of which a fifth of each of ten classes is held out.
    assert sum(samples) == 1442 and abs(samples[1] - 1442 / 5) <= 10


@pytest.mark.parametrize("name", ["stage.json", "task.json", "metrics.jsonl", artifacts.EXAMPLES, "incidents.txt"])
def test_a_file_that_was_altered_costs_the_page_a_part_and_is_named(restarted, tmp_path, name):
    (restarted / name).write_text('{"kind": "train"}\n' if name == "metrics.jsonl" else "2026-99-99 99:99:99 {torn\n")
    text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
    assert "UNKNOWN" in text or "cannot be shown" in text


def test_a_run_and_a_set_in_a_store_are_shown_as_those_on_a_disk(tmp_path, shards, monkeypatch, capsys):
    """Both in S3: the images of a judged set are read there, and no temporary path is on the page."""
    folder = make_run(tmp_path / "there", shards)
    shutil.copytree(shards / "test", tmp_path / "index")
    for tar in (tmp_path / "index").glob("*.tar"):
        tar.unlink()
    there = load_index(shards / "test")
    write_index(tmp_path / "index" / "test.index.json", "s3://images/set", there.shards, there.class_counts)
    samples = [{"shard": 0, "sample": 7, "labels": [1], "predicted": 2, "confidence": 0.75}]
    artifacts.write_record(
        folder / artifacts.EXAMPLES, {"step": 24, "set": str(tmp_path / "index"), "samples": samples}
    )
    (folder / "log.txt").write_text("bad sample 1 replaced: train-000001.tar k7: not a JPEG\n")
    write_status(tmp_path / "there", None, "running", "python -m jobs run x")
    files = {f"set/{tar.name}": tar for tar in (shards / "test").glob("*.tar")}
    for file in (tmp_path / "there").rglob("*.*"):
        files[f"runs/there/{file.relative_to(tmp_path / 'there')}"] = file
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    with store("s3", files):
        assert main(["report", "s3://images/runs/there", "--output", str(tmp_path / "page.html")]) == 0
        kept_by_run = write_report([tmp_path / "there"], tmp_path / "kept.html", with_replay=False).read_text()
    text = (tmp_path / "page.html").read_text()
    pixels = decode(ShardReader(there).read(0, 7)[1])
    assert str(jpeg(pixels)) in text and str(jpeg(pixels)) not in kept_by_run
    assert "its images lie in a store; to see them: python -m jobs report " in kept_by_run
    assert "patchline-run-" not in text, "the copy's folder is gone when somebody reads the page"
    assert "not a JPEG" in text and "Running since" in text


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
    document = {"results": [{"set": {"name": "test"}, "values": {"top-1": value}}]}
    (folders["evaluate"] / "evaluation.json").write_text(json.dumps(document))
    folders["figures"].mkdir()
    (folders["figures"] / "analysis.json").write_text('{"weights": "runs/digits/finetune", "images": ["a", "b"]}')
    for name in ("attention.png", "inside.png"):
        picture = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8)
        (folders["figures"] / name).write_bytes(cv2.imencode(".png", picture)[1].tobytes())
    text = write_report([restarted.parent], tmp_path / "page.html", with_replay=False).read_text()
    shown = Tables(text)
    assert shown.row("optim.lr=0.01") == ["optim.lr=0.01", "91.23%", "90.12% to 92.34%", "± 0.45%", "3"]
    assert shown.row("optim.lr=0.3")[1] == "diverged" and "Chosen: optim.lr=0.01" in shown.text
    assert 'aria-label="grid: accuracy, 95 %"' in text and 'aria-label="training loss of the runs"' in text
    assert shown.row("test", "top-1")[2:] == ["87.65%", "85.00% to 90.00%", "1,234"]
    assert "runs/digits/finetune, over 2 images" in shown.text
    assert 'alt="attention.png"' in text and 'alt="inside.png"' in text


RECIPE = """
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
"""


def run(folder: Path, shards: Path, lr: float) -> Path:
    """A run of six steps; returns its directory."""
    recipe = folder / f"lr-{lr}.yaml"
    recipe.write_text(RECIPE.format(run=folder / f"lr-{lr}", shards=shards, lr=lr))
    assert main(["run", str(recipe)]) == 0
    return folder / f"lr-{lr}"


def test_a_run_keeps_its_page_and_two_runs_part_behind_the_first_update(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.delenv(page_watcher.SWITCH)
    first = run(tmp_path, shards, 0.01)
    assert f"page: {first / 'report.html'}" in capsys.readouterr().out
    shown = Tables((first / "report.html").read_text())
    assert "Done. pretrain accuracy" in shown.text and "the confident mistakes first" in shown.text
    (folder,) = first.glob("pretrain-*")

    # The predictions are those of the weights that the stage hands on, computed by a plain pass.
    import torch

    import models
    from data.order import Order

    weights, config = models.load_weights(folder)
    model = models.from_config(config)
    model.load_state_dict(weights)
    reader = ShardReader(load_index(shards / "test"))
    record = json.loads((folder / artifacts.EXAMPLES).read_text())
    examples = record["samples"]
    taken_for = np.zeros((10, 10), int)
    outputs = {}
    for number, shard in enumerate(reader.index.shards):
        for sample in range(shard.samples):
            _, image, label = reader.read(number, sample)
            pixels = torch.from_numpy(decode(image)).permute(2, 0, 1)[None] / 127.5 - 1
            with torch.no_grad():
                output = model.eval()(pixels).softmax(1)[0]
            taken_for[int(label), int(output.argmax())] += 1
            outputs[number, sample] = (int(label), output)
    for example in examples:
        label, output = outputs[example["shard"], example["sample"]]
        assert example["labels"] == [label]
        assert example["predicted"] == int(output.argmax())
        assert example["confidence"] == pytest.approx(float(output.max()), abs=1e-5)
    # So are the counts by class: its samples, right ones, and what most of the others are taken for.
    for label, samples, right, other, times in record["classes"]:
        mistakes = taken_for[label].copy()
        mistakes[label] = 0
        assert [samples, right, times] == [taken_for[label].sum(), taken_for[label, label], mistakes.max()]
        assert other == (mistakes.argmax() if times else -1)
    assert len(record["classes"]) == 10
    is_wrong = [example["predicted"] not in example["labels"] for example in examples]
    mistakes = [example["confidence"] for example in examples if example["predicted"] not in example["labels"]]
    hits = [example["confidence"] for example in examples if example["predicted"] in example["labels"]]
    assert is_wrong == sorted(is_wrong, reverse=True)
    assert mistakes == sorted(mistakes, reverse=True) and hits == sorted(hits, reverse=True)
    assert len(examples) == 32 and 0 < len(mistakes) <= 24

    # The batch of a spike is the one that the order of samples says.
    add(folder, {**SPIKE, "step": 5})
    spiked = write_report([first], tmp_path / "spiked.html").read_text()
    index = load_index(shards / "train")
    _, shard, sample = Order(index.shard_samples, seed=0, batch_size=16).batch(4)
    places = [f"{index.shards[a].name}, {b}" for a, b in zip(shard.tolist(), sample.tolist(), strict=True)]
    assert re.findall(r">(train-\d+\.tar, \d+)<", spiked) == places

    # A page that cannot be made costs the run a line.
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(page, "write_report", fail)
    second = run(tmp_path, shards, 0.02)
    assert "no page of this run: RuntimeError: no ink" in capsys.readouterr().out
    assert not (second / "report.html").exists()
    monkeypatch.undo()

    compared = Tables(write_report([first, second], tmp_path / "both.html").read_text())
    # The rate of step 1 is 0: the warm-up begins there. Step 2 is the first that moves weights by another amount.
    assert "part at step 3: loss" in compared.text
    assert compared.row("config", "optim.lr")[2:4] == ["0.01", "0.02"]
    assert re.search(r"Likeliest cause:\s+config, optim.lr\s+\(0.01 → 0.02\)", compared.text)
