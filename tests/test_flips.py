"""Flip three hundred bits in the files of a finished run and its shards: each is detected by file name, or harmless.

1. A campaign packs, pretrains, resizes, fine-tunes and probes; its shards have been read and are marked as verified.
   Interrupted packing, a range of excluded steps and exported weights are added.
2. Every file gets one flip; the other flips are drawn in proportion to the files' sizes. Size, modification time and
   inode stay the same.
3. After each flip the test runs the next command that reads the file, or the function with which it does so.
4. A flip is detected if the reader rejects the file and names it with its folder. It is harmless if the result equals
   that of the intact file and the file's class is in HARMLESS. Any other outcome is silent corruption or an error
   without the file's name, and fails the test.

`FAULT_SEED=N` draws other bits. The table that this test prints is in docs/design/faults.md.
"""

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from data.errors import DataError, ExitCode, PatchlineError
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample, digits
from data.index.document import load_index
from data.index.index import Index
from data.reader import ShardReader
from data.storage import Folder
from jobs import ownership
from jobs.__main__ import main
from jobs.ownership import Lease
from jobs.run.log import write_status
from pipeline import artifacts, health
from pipeline.artifacts import write_record
from pipeline.checkpoints import reader as checkpoint_reader
from pipeline.monitoring.telemetry import Telemetry
from tests.support import campaigns
from tests.test_pipeline.monitoring.test_telemetry import REPORT

FLIPS = 300
SEED = int(os.environ.get("FAULT_SEED", "20261122"))

RECIPE = """
run: {run}
cluster: {{workers: 2, backend: processes, backoff_s: 0}}
shards:
  kind: pack
  shard_samples: 400
  sets:
    train: {{source: digits, split: train, image_size: 16}}
    test: {{source: digits, split: test, image_size: 16}}
pretrain:
  data: {{train: "@shards/train", evaluate: "@shards/test"}}
  model: {{name: mu/8, width: 16, depth: 2, mlp: 32, heads: 2, image_size: 16, classes: 10}}
  optim: {{lr: 2.0e-3, schedule: {{warmup_steps: 5}}}}
  loss: softmax
  steps: 12
  batch_size: 16
  micro_batch: 8
  precision: fp32
  log_every: 3
  save_every: 4
resize: {{init: "@pretrain", image_size: 24}}
finetune:
  init: "@resize"
  data: {{train: "@shards/train"}}
  model: {{classes: 10}}
  optim: {{lr: 0.05, schedule: {{warmup_steps: 2}}}}
  steps: 4
  batch_size: 16
  micro_batch: 8
  precision: fp32
  zero: 0
fewshot: {{init: "@resize", probe: {{train: "@shards/train", test: "@shards/test", shots: [1]}}}}
"""

# Classes of files in which a flip may have no effect, with the reason; in all others it must be detected.
HARMLESS = {
    "log": "a log: shown to people, no result is made of it",
    "metrics": "the stage has finished; what decides from a record refuses a damaged one (test_best.py)",
    "attempt": "what a worker of an attempt that has ended left behind: read while the attempt runs",
    "lease and status": "how the last command ended, in words: shown to people, a start writes it anew",
    "shard": "a header or padding of a tar: the index knows where the samples lie",
    "journal of a packing": "a torn or altered line is left out, and its shard is written again",
}

# Stages to run in addition after a change to a file of this stage: they read the file, and have a new key.
NEXT = {
    "shards": ("pretrain.seed=1", "finetune.steps=3", "fewshot.probe.shots=[2]"),
    "pretrain": ("resize.image_size=32", "finetune.steps=3", "fewshot.probe.shots=[2]"),
    "resize": ("finetune.steps=3", "fewshot.probe.shots=[2]"),
}


class Answer(NamedTuple):
    """The result of reading a file."""

    code: int  # exit code of the command; 0 if a function was called and returned
    message: str
    result: object  # compared with the result for the intact file


class Made(NamedTuple):
    """The run and files in which bits are flipped."""

    folder: Path
    recipe: Path
    run: Path
    stages: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Make a finished run with verified shards, and the files that only interrupted commands leave."""
    folder = tmp_path_factory.mktemp("flips")
    recipe = folder / "small.yaml"
    recipe.write_text(RECIPE.format(run=folder / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATCHLINE_CACHE", str(folder / "node"))
        assert main(["run", str(recipe)]) == 0
        loaded = campaigns.load(recipe, [])
        stages = {stage.name: loaded.directory(stage) for stage in loaded.stages}
        assert main(["export", str(stages["pretrain"]), str(folder / "exported"), "--format", "safetensors"]) == 0
        stop_packing_in_the_middle(folder / "stopped")
        write_record(folder / health.EXCLUDED_STEPS, {"stretches": [[10, 17], [30, 31]]})
        yield Made(folder, recipe, folder / "run", stages)


def stop_packing_in_the_middle(folder: Path) -> None:
    """Pack until the source raises an error; like killed packing, this leaves a journal of the finished shards."""

    def ends_early() -> Iterator[Sample]:
        yield from islice(digits(True, image_size=16), 250)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(ends_early(), folder, name="train", shard_samples=50)
    assert (folder / "train.index.json.partial").exists()


# ------------------------------------------------------------------------ a flip


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Flip a bit in place, without changing size, inode and times; restore the file afterwards.

    A command may rewrite the file meanwhile, as all do with status.json.
    """
    original = file.read_bytes()
    damaged = bytearray(original)
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    overwrite(file, damaged)
    try:
        yield
    finally:
        overwrite(file, original)


def overwrite(file: Path, content: bytes) -> None:
    times = file.stat()
    with open(file, "r+b") as opened:
        opened.write(content)
        opened.truncate()
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def drawn(files: list[Path], draw: random.Random) -> list[tuple[Path, int]]:
    """Draw (file, bit): every file once, the rest in proportion to size."""
    sizes = [file.stat().st_size for file in files]
    chosen = files + draw.choices(files, weights=sizes, k=FLIPS - len(files))
    return [(file, draw.randrange(8 * file.stat().st_size)) for file in chosen]


# ------------------------------------------------------------------------ who reads what


def class_of(file: Path, made: Made) -> str:
    """Return the class of a file as in the table of docs/design/faults.md."""
    place = file.relative_to(made.folder).parts
    if file.suffix == ".partial":
        return "journal of a packing"
    if file.name == health.EXCLUDED_STEPS:
        return "excluded-steps.json"
    if place[0] == "exported":
        return "exported weights"
    if file.suffix == ".tar":
        return "shard"
    if file.suffix == ".npy" or file.name.endswith(".index.json"):
        return "index and tables"
    if "checkpoints" in place:
        return "checkpoint"
    if "attempts" in place:
        return "attempt"
    if file.name == "status.json" or "leases" in place:
        return "lease and status"
    if file.name == "metrics.jsonl":
        return "metrics"
    # The examples are only for the run's page, which reports a damaged file.
    if file.name in ("log.txt", "incidents.txt", artifacts.EXAMPLES) or "tensorboard" in place:
        return "log"
    return "record or weights of a stage"


def ask(file: Path, made: Made, run: Callable[[list[str]], Answer], draw: random.Random | None) -> Answer:
    """Run the next reader of the file; without a random generator, the simplest one."""
    kind = class_of(file, made)
    recipe = str(made.recipe)
    if kind == "journal of a packing":
        return packed_to_the_end(made)
    if kind == "excluded-steps.json":
        return calling(lambda: artifacts.read_record(file))
    if kind == "exported weights":
        return run(["export", str(file.parent), str(made.folder / "out"), "--format", "timm"])
    if kind in ("shard", "index and tables"):
        return calling(lambda: contents(load_index(file.parent)))
    if kind == "checkpoint":
        answer = run(["checkpoints", "verify", str(file.parents[2])])
        chosen = calling(lambda: checkpoint_reader.verify(file.parent))  # the basis of a resume's decisions
        assert (chosen.code == 0) == (answer.code == 0)
        return answer
    if kind == "record or weights of a stage":
        next_stages = NEXT.get(file.parent.name.partition("-")[0], ())
        if draw is None or not next_stages:
            return run(["run", recipe])
        return run(["run", recipe, draw.choice(next_stages)])
    # No output depends on the others: inspection, a rebuilt batch and a start must give the same. The start comes last,
    # because it writes status.json and the lease anew.
    target = made.folder / "batch.npz"
    answers = []
    for look in (["status", str(made.run)], ["checkpoints", "list", str(made.run)]):
        answers.append(run(look)._replace(result=None))
    replayed = run(["replay", str(made.stages["pretrain"]), "step=5", "--to", str(target)])
    answers += [replayed._replace(result=batch_of(target)), run(["run", recipe])]
    return first_error_or_all(answers)


def batch_of(file: Path) -> list[bytes]:
    if not file.exists():
        return []
    with np.load(file) as arrays:
        batch = [arrays[name].tobytes() for name in ("images", "labels", "ids")]
    file.unlink()
    return batch


def first_error_or_all(answers: list[Answer]) -> Answer:
    """Combine several answers into one: the first error, or the results of all."""
    for answer in answers:
        if answer.code != 0:
            return answer
    return Answer(0, "", [answer.result for answer in answers])


def calling(function: Callable[[], object]) -> Answer:
    """Return a function's result or the Patchline error that it raised; any other error fails the test."""
    try:
        return Answer(0, "", function())
    except PatchlineError as error:
        return Answer(65, str(error), None)


def contents(index: Index) -> list[object]:
    """Return all that a run reads from a set: its samples' bytes and index entries."""
    reader = ShardReader(index)
    samples = [reader.read(shard, n) for shard, size in enumerate(index.shard_samples) for n in range(size)]
    return [samples, vars(index)]


def pack_to_the_end(stopped: Path, copy: Path) -> Index:
    """Resume the interrupted packing in a copy; return the set."""
    shutil.copytree(stopped, copy)
    return pack(islice(digits(True, image_size=16), 300), copy, name="train", shard_samples=50)


def packed_to_the_end(made: Made) -> Answer:
    """Return the samples and the index of the set after the interrupted packing is finished."""
    copy = made.folder / "copy"
    try:
        return calling(lambda: contents(pack_to_the_end(made.folder / "stopped", copy)))
    finally:
        shutil.rmtree(copy)


# ------------------------------------------------------------------------ the test


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hundred_flips_over_every_file_are_found_or_harmless(made, capsys):
    def run(arguments: list[str]) -> Answer:
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        shutil.rmtree(made.folder / "out", ignore_errors=True)
        return Answer(code, out + err, re.sub(r"\d+s\*?", "", out))  # a stage's duration is not a result

    files = sorted(
        path
        for path in made.folder.rglob("*")
        if path.is_file()
        and path.stat().st_size
        and path != made.recipe
        and not path.is_relative_to(made.folder / "node")
        # Include only the journal of the interrupted packing: its tars and tables are like those of the run.
        and not (path.is_relative_to(made.folder / "stopped") and path.suffix != ".partial")
    )
    draw = random.Random(SEED)
    flips = drawn(files, draw)
    expected: dict[Path, Answer] = {}
    fates: dict[str, Counter[str]] = {}
    unexpected: list[str] = []
    for file, bit in flips:
        kind = class_of(file, made)
        # A command that read another file has replaced the lease, or deleted a killed worker's temporary file.
        if not file.exists() and (kind == "lease and status" or file.name.startswith(".tmp-")):
            continue
        if file not in expected:
            expected[file] = ask(file, made, run, None)
            assert expected[file].code == 0, (file, expected[file])
        with flipped(file, bit):
            answer = ask(file, made, run, draw)
        is_named = file.name in answer.message and file.parent.name in answer.message
        if is_named and answer.code in (ExitCode.DATA, ExitCode.IO):
            fate = "found"
        elif answer.code == 0 and answer.result == expected[file].result and kind in HARMLESS:
            fate = "harmless"
        elif answer.code != 0:
            fate = "without a name"
        else:
            fate = "silent"
        if fate in ("silent", "without a name"):
            unexpected.append(
                f"{file.relative_to(made.folder)} bit {bit}: {fate}: {answer.code} {answer.message[-300:]}"
            )
        fates.setdefault(kind, Counter())[fate] += 1

    with capsys.disabled():
        print(f"\nseed {SEED}, {len(flips)} flips over {len(files)} files")
        for kind, counts in sorted(fates.items()):
            print(f"| {kind} | {counts.total()} | {counts['found']} | {counts['harmless']} | {counts['silent']} |")
    assert not unexpected, "\n".join(unexpected)
    assert main(["run", str(made.recipe)]) == 0, "every bit was put back, and nothing else was changed"


# ------------------------------------------------------------------------ files of interrupted commands


def test_any_bit_of_the_excluded_steps_is_found(tmp_path):
    write_record(tmp_path / health.EXCLUDED_STEPS, {"stretches": [[10, 17], [30, 31]]})
    file = tmp_path / health.EXCLUDED_STEPS
    assert artifacts.read_record(file)["stretches"] == [[10, 17], [30, 31]]
    for bit in range(8 * file.stat().st_size):
        with flipped(file, bit), pytest.raises(DataError, match=r"excluded-steps\.json has changed"):
            artifacts.read_record(file)


def test_flipped_bit_in_the_journal_of_interrupted_packing_does_not_change_the_set(tmp_path):
    stop_packing_in_the_middle(tmp_path / "stopped")
    whole = contents(pack_to_the_end(tmp_path / "stopped", tmp_path / "whole"))
    journal = tmp_path / "stopped" / "train.index.json.partial"
    draw = random.Random(SEED)
    for number in range(30):
        with flipped(journal, draw.randrange(8 * journal.stat().st_size)):
            index = pack_to_the_end(tmp_path / "stopped", tmp_path / f"{number}")
        assert contents(index)[0] == whole[0]
        assert index.digest == load_index(tmp_path / "whole").digest
        written = json.loads((tmp_path / f"{number}" / "train.index.json").read_text())
        assert written == json.loads((tmp_path / "whole" / "train.index.json").read_text())


def test_altered_log_or_status_is_named_and_never_reported_as_a_bug(tmp_path, capsys, monkeypatch):
    stage = tmp_path / "run" / "pretrain-1a2b3c4d"
    telemetry = Telemetry(stage, rank=0, attempt=1)
    telemetry.report("start", {"step": 0, "world": 2, "claimed": 1.0, "drop": [], "text": "random weights"})
    telemetry.report("train", REPORT)
    telemetry.close()
    (stage / "stage.json").write_text("{}")
    write_status(tmp_path / "run", None, "running", "python -m jobs run digits")
    monkeypatch.setattr(ownership, "PERIOD_S", 0.01)  # a command watches an unreadable lease
    monkeypatch.setattr(ownership, "READ_RETRY_S", 0.0)
    lease = Lease(Folder(tmp_path / "run"), print)
    lease.record["pid"] = 4_999_999
    lease.take()
    look = ["status", str(tmp_path / "run")]
    assert main(look) == 0
    assert "ended unexpectedly: process 4999999 on" in capsys.readouterr().out
    draw = random.Random(SEED)
    codes: Counter[int] = Counter()
    run = tmp_path / "run"
    for file in (stage / "metrics.jsonl", run / "status.json", run / "leases" / "000001.json"):
        for _ in range(60):
            with flipped(file, draw.randrange(8 * len(file.read_bytes().rstrip()))):
                code = main(look)
            shown, said = capsys.readouterr()
            codes[code] += 1
            assert code == 0 or (code == 65 and f"{file} has changed" in said), (file, said)
            # Every record of metrics.jsonl has a digest; the newest training record may be the damaged one.
            if file.name == "metrics.jsonl":
                assert f"{file} is damaged: line " in shown
    assert codes[0] > 60
