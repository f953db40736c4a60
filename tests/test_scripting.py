"""A script meets planted failures, and brings every command to a successful end by what the documents say."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.files import import_path
from data.storage import Folder
from jobs.__main__ import main
from jobs.ownership import Lease
from jobs.run.log import write_status
from pipeline.artifacts import write_record
from tests.support.campaign_script import Document, Killed, Script, Words, arguments, with_json
from tests.support.documents import check
from tests.support.photos import make_photos
from tests.support.recipes import SHORT

ROOT = Path(__file__).parents[1]

# As `python -m jobs`, but the owner of a run looks for a request to stop twice a second instead of every five seconds.
HASTY = "from jobs import ownership; ownership.PERIOD_S = 0.5; from jobs.__main__ import run_process; run_process()"
LONG = ["pretrain.steps=400", "pretrain.save_every=20", "pretrain.log_every=20"]


def in_process(words: Words) -> Document:
    """Run a command in this process, because a new process would take seconds; return its checked document."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(with_json(words))
    document: Document = json.loads(out.getvalue())
    assert document["code"] == code
    if document["schema"] != "error.1":
        check(document)
    return document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A folder with a recipe and its data, and a finished run."""
    folder = tmp_path_factory.mktemp("scripting")
    shutil.copytree(shards / "train", folder / "shards" / "train")
    shutil.copytree(shards / "test", folder / "shards" / "test")
    (folder / "small.yaml").write_text(SHORT.format(data="train: shards/train"))
    (folder / "photos").mkdir()
    make_photos(folder / "photos" / "cat")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    # The commands in documents begin as the user has typed them.
    monkeypatch.setattr(sys, "argv", [str(ROOT / "jobs" / "__main__.py")])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "jobs"])
    return folder


def script(**hands: Callable[[Document], None]) -> Script:
    return Script(hands, run=in_process, log=lambda line: print(line, file=sys.stderr), pause_s=0.1)


def test_typing_errors_end_in_a_plan(here: Path) -> None:
    """A typo in a command, a recipe's name, a key, an option, a value's path, and in the recipe itself."""
    for words in (
        ["paln", "small.yaml"],
        ["plan", "smal.yaml"],
        ["plan", "small.yaml", "pretrain.optm.lr=1e-3"],
        ["plan", "small.yaml", "--frsh"],
        ["plan", "small.yaml", "pretrain.data.train=shards/trian"],
    ):
        document = script().finish(words)
        assert document["schema"] == "plan.1"
        assert document["stages"][0]["name"] == "pretrain"
    (here / "typo.yaml").write_text(SHORT.format(data="train: shards/train").replace("loss:", "lss:"))
    assert script().finish(["plan", "typo.yaml"])["schema"] == "plan.1"
    assert (here / "typo.yaml").read_text() == SHORT.format(data="train: shards/train")


def test_wrong_world_size_becomes_the_nearest_batch(here: Path) -> None:
    words = ["plan", "small.yaml", "pretrain.batch_size=30", "cluster.workers=4", "pretrain.micro_batch=4"]
    assert script().finish(words)["stages"][0]["name"] == "pretrain"


def test_missing_variable_is_set(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = script(variable=lambda step: monkeypatch.setenv(step["name"], "shards"))
    assert hand.finish(["plan", "small.yaml", "pretrain.data.train=${oc.env:MY_SHARDS}/train"])["code"] == 0


def test_unwritable_run_folder_and_unknown_stage_end_in_a_run(here: Path) -> None:
    def elsewhere(step: Document) -> None:
        step["elsewhere"] = "runs/small"

    # As root, only a file system like /sys refuses a new folder.
    words = ["run", "small.yaml", "run=/sys/run", "--only", "pretran"]
    (stage,) = script(permission=elsewhere).finish(words)["stages"]
    assert Path(stage["weights"], "weights.safetensors").exists()


def test_diverged_rate_and_the_changed_recipe_end_in_finite_weights(here: Path) -> None:
    """The script lowers the rate, and restarts the stage because its recipe has changed."""
    words = ["run", "small.yaml", "run=runs/diverged", "pretrain.optim.lr=1e8", "pretrain.steps=12"]
    (stage, *_) = reversed(script().finish(words)["stages"])
    weights = load_file(Path(stage["weights"]) / "weights.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_altered_and_lost_shards_are_dropped_or_repaired(here: Path) -> None:
    shutil.copytree("shards/train", "bad/train")
    altered, lost, *_ = sorted(Path("bad/train").glob("*.tar"))
    content = bytearray(altered.read_bytes())
    content[3000:9000] = bytes(6000)
    altered.write_bytes(content)
    checked = script().run(["data", "check", "bad/train"])
    assert checked["code"] == 65
    # The repaired set replaces the bad one in the command that checks it.
    assert script().finish(["data", "check", "bad/train"])["set"] == "train-repaired"
    lost.unlink()
    (stage,) = script().finish(["run", "small.yaml", "run=runs/dropped", "pretrain.data.train=bad/train"])["stages"]
    assert stage["state"] == "done"


def test_weights_with_nan_are_restored(here: Path) -> None:
    script().finish(["run", "small.yaml"])
    script().finish(["export", "runs/small/pretrain", "weights"])
    shutil.copytree("weights", "backup")
    values = load_file("weights/weights.safetensors")
    values[next(iter(values))].view(-1)[0] = torch.nan
    save_file(values, "weights/weights.safetensors")
    os.remove("weights/provenance.json")  # otherwise the digest would tell that the file has changed

    def restore(step: Document) -> None:
        shutil.copytree("backup", step["path"], dirs_exist_ok=True)

    document = script(file=restore).finish(["predict", "weights", "photos"])
    assert len(document["images"]) == 3


@pytest.fixture
def driver(here: Path) -> Iterator[Callable[..., Any]]:
    """Start a long run in a separate process, and wait for its first checkpoint."""
    processes = []

    def start(run: str, program: Sequence[str] = ("-m", "jobs")) -> subprocess.Popen[str]:
        words = ["run", "small.yaml", f"run={run}", *LONG]
        command = [sys.executable, *program, *with_json(words)]
        environment = os.environ | {"PYTHONPATH": import_path()}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        while not list(Path(run).glob("pretrain-*/checkpoints/step-*")):
            assert processes[-1].poll() is None
            time.sleep(0.05)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_killed_driver_truncated_checkpoint_and_missing_weights(here: Path, driver: Any) -> None:
    """Three documents lead from a killed run with a truncated checkpoint to its weights."""
    killed = driver("runs/killed")
    killed.send_signal(signal.SIGKILL)
    assert killed.communicate()[0] == "", "a killed command has no document"
    newest = max(Path("runs/killed").glob("pretrain-*/checkpoints/step-*"))
    for file in newest.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])

    resuming = with_json(["run", "small.yaml", "run=runs/killed", *LONG])
    assert script().resume("runs/killed") == resuming
    without_weights = in_process(["predict", "runs/killed/pretrain", "photos"])
    assert arguments(without_weights["next"][0]["command"]) == resuming
    # The script resumes the run, because `verify` says so, and the run then skips the truncated checkpoint.
    assert script().finish(["checkpoints", "verify", "runs/killed"])["code"] == 0
    assert len(script().finish(["predict", "runs/killed/pretrain", "photos"])["images"]) == 3


def test_killed_command_is_resumed_from_its_status(here: Path) -> None:
    """A command without a document: the script reads the status of the run, and runs the command in it."""
    run = Path("runs/never").absolute()
    (run / "pretrain-1").mkdir(parents=True)
    write_record(run / "pretrain-1" / "stage.json", {})
    write_status(run, None, "running", "python -m jobs plan small.yaml")
    commands: list[Words] = []

    def run_first_killed(words: Words) -> Document:
        commands.append(words)
        if len(commands) == 1:
            raise Killed
        return in_process(words)

    Script({}, run=run_first_killed).finish(["run", "small.yaml", "run=runs/never"], "runs/never")
    assert commands[1:] == [["status", "runs/never"], ["plan", "small.yaml"]]


def test_run_of_another_owner_is_stopped_and_continued(here: Path, driver: Any) -> None:
    owner = driver("runs/owned", ("-c", HASTY))
    words = ["run", "small.yaml", "run=runs/owned", *LONG]
    (stage,) = script().finish(words)["stages"]
    assert stage["state"] == "done"
    document = json.loads(owner.communicate()[0])
    # On a fast machine, the owner has finished before it sees the request.
    if document["code"] != 0:
        assert (document["schema"], document["code"]) == ("error.1", 75), "the owner has committed before it stopped"
        assert document["next"][0]["do"] == "repeat"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_full_disk_is_freed(here: Path) -> None:
    Path("full").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", "full"]).returncode != 0:
        pytest.skip("cannot mount a file system here")
    try:
        Path("full/old.bin").write_bytes(bytes(1000 * 1024))

        def free(step: Document) -> None:
            assert Path(step["path"]).is_relative_to(here / "full")
            Path("full/old.bin").unlink()

        (stage,) = script(space=free).finish(["run", "small.yaml", "run=full/run"])["stages"]
        assert stage["state"] == "done"
    finally:
        subprocess.run(["umount", "full"], check=True)


def test_expired_token_is_renewed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.hub import REPOSITORY, TOKEN, hub  # starts https servers

    with hub({f"test/{tar.name}": tar for tar in sorted(Path("shards/test").glob("*.tar"))}) as server:
        server.is_gated = True
        monkeypatch.setenv("HF_TOKEN", "hf_expired")

        def renew(step: Document) -> None:
            assert step["path"].startswith(f"hf://datasets/{REPOSITORY}")
            monkeypatch.setenv("HF_TOKEN", TOKEN)

        words = ["index", f"hf://datasets/{REPOSITORY}/test/*.tar", "--output", "hub"]
        document = script(credentials=renew).finish(words)
        assert document["samples"] == in_process(["data", "check", "shards/test"])["good"]


@pytest.mark.slow
def test_lost_head_is_left_for_this_machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    def leave(step: Document) -> None:
        monkeypatch.delenv(step["name"])

    words = ["run", "small.yaml", "run=runs/ray", "cluster.backend=ray"]
    (stage,) = script(cluster=leave).finish(words)["stages"]
    assert stage["state"] == "done"


@pytest.mark.slow
def test_stale_lock_of_a_lost_machine_is_taken_over(here: Path) -> None:
    lease = Lease(Folder(here / "runs" / "stale"), print)
    lease.take()
    lease.record["machine"] = lease.record["system"] = "another"  # it never renews the lease again
    lease.renew()
    (stage,) = script().finish(["run", "small.yaml", "run=runs/stale"])["stages"]
    assert stage["state"] == "done"
