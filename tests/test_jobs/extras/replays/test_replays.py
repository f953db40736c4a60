"""Replays of a run on real workers: audit, bisect and without; all commands run in one process.

Two workers train the run in exact mode. In step 8 a bit of worker 1's gradient is flipped. All replays run without
faults. Another run starts at step 0 on one worker, with the samples masked in the workers' task: the reference that
never trained on them.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data.index.document import load_index
from data.order import Order
from jobs.cluster import fork_server
from jobs.extras.checkpoints import whole_state
from jobs.extras.history import read_run
from jobs.extras.replays.stretch import AlwaysMasked
from jobs.extras.report.page import write_report
from jobs.extras.report.pictures import Album
from jobs.stages import training
from pipeline import artifacts, train
from pipeline.checkpoints.reader import Reader, verify
from pipeline.engine.exact import ExactEngine
from tests.support.drives import fork_process, launch_by_fork
from tests.support.recipes import without_check

RECIPE = without_check("""
cluster: {workers: 2, backend: processes, backoff_s: 0.1}
shards: {kind: pack, shard_samples: 100, sets: {train: {source: digits, split: train, image_size: 16}}}
pretrain:
  data: {train: "@shards/train", evaluate: "@shards/train"}
  model: {name: mu/8, width: 16, depth: 1, mlp: 32, heads: 2, image_size: 16, classes: 10, dropout: 0.1}
  optim: {lr: 1.0e-3, schedule: {warmup_steps: 5}}
  loss: softmax
  mixup: 0.2
  steps: 20
  batch_size: 16
  micro_batch: 4
  exact_parts: 4
  precision: fp32
  log_every: 4
  save_every: 5
  keep: 9
""")
FLIPPED = "blocks.0.mlp.down.weight"


def flip_in_the_run() -> None:
    """Flip a high bit of worker 1's gradient in step 8, in the run itself but not in its replays."""
    runs: list[str] = []
    set_up = train.set_up
    backward = ExactEngine.backward

    def recording(task: Any) -> Any:
        runs.append(Path(task.job.run).name)
        return set_up(task)

    def flipping(self: ExactEngine, loss: torch.Tensor) -> None:
        backward(self, loss)
        if runs[-1:] == ["run"] and dist.get_rank() == 1 and self.updates == 7 and self.part is not None:
            place = 0
            for name, size in self.sizes.items():
                if name == FLIPPED:
                    self.part.view(torch.int32)[place + 3] ^= 1 << 29
                    break
                place += size

    def masked_from_the_start(*args: Any, **more: Any) -> Any:
        if args[1].campaign.run.name == "start":
            record = artifacts.read_record(Path("listed/without.json"))
            more |= {"until": 15}
            args = (*args[:3], [*args[3], AlwaysMasked(record["ranges"])], *args[4:])
        return make_task(*args, **more)

    make_task = training.make_training_task
    training.make_training_task = masked_from_the_start  # type: ignore[assignment]
    train.set_up = recording  # type: ignore[assignment]
    ExactEngine.backward = flipping  # type: ignore[method-assign]


def first_used_in(step: int, count: int) -> list[str]:
    """Return samples that step `step` is the first to use, as lines of a list file."""
    (path,) = Path().glob("run/shards-*/train")
    index = load_index(path)
    order = Order(index.shard_samples, seed=0, batch_size=16)
    used = set()
    for earlier in range(step - 1):
        used |= set(zip(*(part.tolist() for part in order.batch(earlier)[1:]), strict=True))
    ids = zip(*(part.tolist() for part in order.batch(step - 1)[1:]), strict=True)
    new = [pair for pair in ids if pair not in used][:count]
    return [f"{index.shards[shard].name}\t{index.keys(shard)[sample]}" for shard, sample in new]


def command(folder: str, commands: list[str]) -> None:
    """Run `python -m jobs` once for each command line, in one process with one fork server."""
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    from jobs import __main__

    fork_server.ForkServer.launch = launch_by_fork  # type: ignore[method-assign, assignment]
    flip_in_the_run()
    codes = []
    for number, words in enumerate(commands):
        log = os.open(f"{number}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        sys.stdout.flush()
        os.dup2(log, 1), os.dup2(log, 2)
        sys.argv = ["jobs", *shlex.split(words)]
        codes.append(__main__.main(sys.argv[1:]))
        if number == 0:
            Path("list.txt").write_text("\n".join(first_used_in(7, 2)) + "\n")
    Path("codes.json").write_text(json.dumps(codes))
    sys.stdout.flush()
    os._exit(0)


COMMANDS = {
    "run": "run small.yaml run=run",
    "empty": "without run --samples empty.txt --output none",
    "listed": "without run --samples list.txt --to 15 --output listed",
    "from the start": "run small.yaml run=start cluster.workers=1",
    "clean": "audit run --from 10 --to 15 --output clean cluster.workers=1 --key key",
    "flipped": "audit run --from 5 --to 10 --output flipped",
    "no spike": "bisect run step=12 metric=loss",
    "another": "without run --shards train-000002.tar --output listed",
    "world": "audit run --from 3 --to 10",
    "inside": "audit run --output run/audit",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all commands; return their working directory."""
    folder = tmp_path_factory.mktemp("replays")
    (folder / "small.yaml").write_text(RECIPE)
    (folder / "empty.txt").write_text("\n")
    os.system(f"ssh-keygen -q -t ed25519 -N '' -f {folder}/key")
    process = fork_process(command, str(folder), list(COMMANDS.values()))
    process.start()
    process.join(timeout=300)
    assert (folder / "codes.json").exists(), (folder / f"{len(list(folder.glob('*.log'))) - 1}.log").read_text()
    return folder


def stage(run: Path) -> Path:
    (path,) = run.glob("pretrain-*")
    return path


def last_state(run: Path) -> dict[str, torch.Tensor]:
    """Return every master and moment of the newest checkpoint, joined from all workers."""
    newest = max((stage(run) / "checkpoints").glob("step-*"))
    reader = Reader(newest, verify(newest).files)
    return {f"{name} {kind}": whole_state(reader, name, kind) for name, kind in reader.pieces}


def test_every_command_has_the_expected_exit_code(folder: Path) -> None:
    codes = dict(zip(COMMANDS, json.loads((folder / "codes.json").read_text()), strict=True))
    expected = dict.fromkeys(COMMANDS, 0) | {"flipped": 65, "another": 64, "world": 64, "inside": 64}
    assert codes == expected
    assert not list((folder / "run").glob("audit*"))
    # Replays write no page: nobody would look at it, and it would take a fifth of the time.
    assert (folder / "flipped" / "steps-6-10").is_dir()
    assert not list(folder.glob("flipped/*/report.html"))


def test_without_an_empty_list_the_run_is_reproduced(folder: Path) -> None:
    weights = [(stage(folder / run) / "weights.safetensors").read_bytes() for run in ("run", "none")]
    assert weights[0] == weights[1]
    record = artifacts.read_record(folder / "none" / "audit.json")
    assert record["equals_run"]
    assert record["metrics"] == record["metrics_with"]
    text = (folder / f"{list(COMMANDS).index('empty')}.log").read_text()
    assert text.count(" with them (difference +0.0000)") == len(record["metrics"]) > 0


def test_a_run_without_samples_equals_a_run_that_never_saw_them(folder: Path) -> None:
    """Repeated by two workers from the commit before the first use; trained from step 0 by one worker."""
    ours, theirs = last_state(folder / "listed"), last_state(folder / "start")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    record = artifacts.read_record(folder / "listed" / "audit.json")
    assert (record["removed"]["first_use"], record["removed"]["start"]) == (7, 5)
    assert not record["equals_run"]
    newest = max((stage(folder / "start") / "checkpoints").glob("step-*"))
    assert record["ledger"] == verify(newest).ledger


def test_a_clean_stretch_is_equal_on_another_number_of_workers_and_signed(folder: Path) -> None:
    report = folder / "clean" / "audit.json"
    (finding,) = artifacts.read_record(report)["stretches"]
    assert (finding["verdict"], finding["world"], finding["steps"], finding["traced"]) == ("equal", 1, 5, 5)
    # Conditions are equal, so a differing trace alone would count. Exact traces do not depend on the world size.
    assert finding["conditions"] == {}
    assert finding["states"] == len(last_state(folder / "run"))
    public = (folder / "key.pub").read_text().split()
    (folder / "signers").write_text(f"me {public[0]} {public[1]}\n")
    check = f"ssh-keygen -Y verify -f {folder}/signers -I me -n patchline -s {report}.sig"
    assert os.system(f"{check} < {report} > {folder}/verified 2>&1") == 0, (folder / "verified").read_text()


def test_a_flipped_bit_is_located_by_step_worker_and_parameter(folder: Path) -> None:
    (finding,) = artifacts.read_record(folder / "flipped" / "audit.json")["stretches"]
    assert finding["verdict"] == "silent corruption"
    assert (finding["step"], finding["worker"], finding["what"]) == (8, 1, "gradient")
    assert finding["differing"][0]["parameter"] == FLIPPED


def test_a_step_without_a_spike_blames_no_sample(folder: Path) -> None:
    record = artifacts.read_record(folder / "run-bisect" / "step-12" / "bisect.json")
    assert not record["is_spike"]
    assert record["samples"] == []
    text = (folder / f"{list(COMMANDS).index('no spike')}.log").read_text()
    assert "agrees with the record bit for bit" in text


def test_the_page_of_the_run_shows_the_results_of_its_replays(folder: Path) -> None:
    shown = Album(with_replay=False).replays(read_run(folder / "run"))
    remarks = {gallery.title.partition(",")[0]: [] for gallery in shown}
    for gallery in shown:
        remarks[gallery.title.partition(",")[0]].append(gallery.remark)
    audits = "\n".join(remarks["audit"])
    assert "steps 11 to 15: equal in 5 losses and gradient norms" in audits
    flipped = "steps 6 to 10: silent corruption from step 8 on, first in the gradient of worker 1; largest difference "
    assert flipped in audits
    assert f" in {FLIPPED}" in audits.partition(flipped)[2].partition("\n")[0]
    without = "\n".join(remarks["without"])
    assert "2 of 1,442 samples, first used in step 7" in without
    assert "are equal to the run's, bit for bit" in without
    assert "step 12 from commit 10, loss compared with" in remarks["bisect"][0]
    assert "no spike" in remarks["bisect"][0]
    assert not Album(with_replay=False).replays(read_run(folder / "start")), "the replays belong to another run"
    page = write_report([folder / "run"], folder / "page.html", with_replay=False).read_text()
    assert "Replayed steps" in page
    assert flipped in page
