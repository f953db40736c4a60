"""Count the calls between the command and `model(images)`, and between the training loop and a commit.

What is counted, on a real run with the processes backend: frames on the stack whose files belong to our four
packages. Frames of libraries (torch, DeepSpeed, the command line) and of the tests are not, nor is the line of
`jobs/__main__.py` that calls `main`.

1. To the model: the driver's frames when it has the agent start the workers, of which `main` is the first, and the
   worker's frames, from `run_worker` on, when the forward pass of the model begins; the last is the function that calls
   the model. What the fork server has on its stack when it forks belongs to neither.
2. To the commit: the frames below the training loop, `pipeline.train.train`, when `rename` (data/files.py) gives a
   checkpoint its name; the last is the function that calls it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recipes import TINY
from tests.support.stacks import ROOT, Call, numbered, recorded

pytestmark = pytest.mark.quick

MOST_CALLS_TO_THE_MODEL = 12
MOST_CALLS_TO_A_COMMIT = 3
WORKER = ("jobs/cluster/worker.py", "run_worker")
LOOP = ("pipeline/train.py", "train")


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Return the folder with the call stacks recorded while one worker pretrained for two steps."""
    folder = tmp_path_factory.mktemp("stacks")
    recipe = folder / "tiny.yaml"
    pretraining_alone = TINY.partition("resize:")[0]
    recipe.write_text(pretraining_alone.format(run=folder / "run", shards=shards))
    # In a new process: its workers are forks of it, and the threads that earlier tests started here do not survive a
    # fork, but the locks that they held do.
    command = [sys.executable, "-m", "tests.support.stacks", str(folder), str(recipe), "cluster.workers=1"]
    command += ["pretrain.steps=2", "pretrain.data.evaluate=null", "pretrain.optim.schedule.warmup_steps=1"]
    command += ["pretrain.check_engine=false"]  # its small model is called first
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def show(title: str, calls: list[Call]) -> str:
    """Print the calls for `pytest -s`, and return them for an assertion's message."""
    lines = [f"{title}: {len(calls)} calls", *numbered(calls)]
    text = "\n".join(lines)
    print(f"\n{text}")
    return text


def test_at_most_twelve_calls_from_the_command_to_the_model(stacks: Path) -> None:
    in_the_driver = recorded(stacks, "start")
    on_the_stack = recorded(stacks, "forward")
    in_the_worker = on_the_stack[on_the_stack.index(WORKER) :]
    assert in_the_driver[0] == ("jobs/__main__.py", "main")
    assert LOOP in in_the_worker, "the worker's way to the model leads through the training loop"
    calls = in_the_driver + in_the_worker
    text = show("from `python -m jobs run` to model(images)", calls)
    assert len(calls) <= MOST_CALLS_TO_THE_MODEL, text


def test_at_most_three_calls_from_the_loop_to_a_committed_checkpoint(stacks: Path) -> None:
    in_the_worker = recorded(stacks, "commit")
    calls = in_the_worker[in_the_worker.index(LOOP) + 1 :]
    text = show("from the training loop to the rename of a checkpoint", calls)
    assert len(calls) <= MOST_CALLS_TO_A_COMMIT, text
