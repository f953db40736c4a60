"""Memory traces are cached by everything that affects them."""

import dataclasses
import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import models
from jobs.__main__ import main
from pipeline.extras.plan import memory_traces
from pipeline.extras.plan.memory_traces import MemoryTrace, Moment, step_to_trace
from pipeline.optimization import OptimConfig
from pipeline.training_config import TrainConfig
from tests.support.configs import FullConfig

MOMENT = {"phase": "forward", "fixed": [1, 2, 3, 4, 5], "per_image": [0, 1, 0, 0, 1]}
SMALL = TrainConfig(steps=1, micro_batch=4, batch_size=16)


@pytest.fixture(autouse=True)
def untraced(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace steps for real, into a separate folder of this session."""
    folder = tmp_path_factory.getbasetemp() / "traces"
    monkeypatch.setenv("PATCHLINE_CACHE", str(folder))


def test_peak_moment_depends_on_the_micro_batch():
    update = Moment("update", (100.0, 0, 50.0, 0, 0), (0.0, 0, 0, 0, 1.0))
    backward = Moment("backward", (100.0, 0, 0, 0, 0), (0.0, 10.0, 0, 0, 1.0))
    trace = MemoryTrace(0, (update, backward), (backward,))
    assert trace.peak(2).phase == "update"
    assert trace.peak(6).phase == "backward"
    assert trace.peak(6).parts(6) == [100, 60, 0, 0, 6]


@pytest.fixture
def tracer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[memory_traces.StepToTrace]:
    """Collect the steps that the fake tracer receives; its traces begin with 7 bytes. The cache is a test folder."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    asked: list[memory_traces.StepToTrace] = []

    def run(step: memory_traces.StepToTrace) -> str:
        asked.append(step)
        return json.dumps({"start": 7, "moments": [MOMENT], "activations": [MOMENT]})

    monkeypatch.setattr(memory_traces, "run_tracer", run)
    return asked


def step_of(cfg: TrainConfig = SMALL, world: int = 2, accumulation: int = 2) -> memory_traces.StepToTrace:
    return step_to_trace(cfg, models.config_of("mu/8", 16, 10), world, accumulation, 0, is_gpu=False)


def test_every_training_field_is_traced_or_excluded_on_purpose() -> None:
    """Fields of a step to trace are listed by hand: a forgotten one would silently be planned with its default."""
    in_the_step = {"objective", "loss", "label_smoothing", "mixup", "polyak", "exact_parts", "precision", "zero"}
    in_the_step |= {"data", "optim", "steps", "micro_batch", "batch_size", "deepspeed"}
    beside_it = {"model", "init", "checkpoint_blocks"}  # as the model and the blocks recomputed
    not_traced = {"thinning", "compile"}  # excluded from the plan, as docs/design/memory.md states
    without_memory = {"new_head", "passes", "uneven", "seed", "evaluate_every", "evaluate_on", "probe", "log_every"}
    without_memory |= {
        "keep_best",
        "patience",
        "save_every",
        "begin",
        "law",
        "health",
        "keep",
        "keep_every",
        "max_skipped",
        "max_failed_saves",
        "timeout_s",
        "stall_s",
    }
    fields = {field.name for field in dataclasses.fields(FullConfig)}
    assert fields == in_the_step | beside_it | not_traced | without_memory
    step = step_to_trace(TrainConfig(steps=1), models.ViTConfig(), 1, 1, 0, is_gpu=False)
    assert set(step.config) == in_the_step - {"deepspeed"}


def test_trace_is_cached_by_everything_that_affects_it(tracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def traced(step: memory_traces.StepToTrace) -> int:
        """Return the number of traces made for this step."""
        before = len(tracer)
        memory_traces.trace_of(step)
        return len(tracer) - before

    assert traced(step_of()) == 1
    assert traced(step_of()) == 0
    # The micro-batch size, the learning rate, the length and a fifth micro-batch need no new trace.
    assert traced(step_of(dataclasses.replace(SMALL, micro_batch=8, steps=7), accumulation=5)) == 0
    for change in ({"zero": 3}, {"polyak": 0.9}, {"loss": "softmax"}, {"precision": "fp32"}, {"mixup": 0.1}):
        assert traced(step_of(dataclasses.replace(SMALL, **change))) == 1, change
    # Values at the start do not change the memory.
    biased = models.config_of("mu/8", 16, 10, head_bias=-10.0, position_std=0.1)
    assert traced(step_to_trace(SMALL, biased, 2, 2, 0, is_gpu=False)) == 0
    # Other nonzero values need no new trace; a head with a different decay is a separate parameter group.
    for change in ({"polyak": 0.99}, {"mixup": 0.2}, {"optim": OptimConfig(lr=1.0, weight_decay=3.0, clip=7.0)}):
        assert traced(step_of(dataclasses.replace(SMALL, **change))) == 0, change
    for decay, count in ((None, 0), (0.1, 0), (3.0, 1), (2.0, 0), (0.0, 1)):
        optim = OptimConfig(weight_decay=0.1, head_weight_decay=decay)
        assert traced(step_of(dataclasses.replace(SMALL, optim=optim))) == count, decay
    for options in ({"recomputed": 1}, {"is_gpu": True}, {"world": 4}):
        assert traced(dataclasses.replace(step_of(), **options)) == 1, options
    # Changed code or libraries and truncated or altered files require a new trace.
    for name in ("digest_of_sources", "version"):
        with monkeypatch.context() as patch:
            patch.setattr(memory_traces, name, lambda *_: "another")
            assert traced(step_of()) == 1, name
    for change in (lambda kept: kept[:20], lambda kept: kept.replace(b'"start": 7', b'"start": 6')):
        for path in (tmp_path / "cache" / "patchline" / "memory").glob("*.trace"):
            assert change(path.read_bytes()) != path.read_bytes()
            path.write_bytes(change(path.read_bytes()))
        assert traced(step_of()) == 1
        assert memory_traces.trace_of(step_of()).start == 7


@pytest.mark.parametrize("obstacle", ["a file in its way", "no locks", "no room"])
def test_unusable_cache_folder_is_logged_and_does_not_stop_the_plan(
    obstacle: str, tracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def refuse_write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if obstacle == "a file in its way":
        (tmp_path / "cache").write_text("")
    elif obstacle == "no locks":
        monkeypatch.setattr("fcntl.flock", refuse_lock)
    else:
        monkeypatch.setattr(memory_traces, "write_entry", refuse_write)
    assert memory_traces.trace_of(step_of()).start == 7, "traced once, though not kept"
    assert tracer == [step_of()], "traced once, though not kept"
    if obstacle != "no locks":
        assert "cannot cache memory traces" in caplog.text


def test_every_new_trace_is_reported_and_a_cached_one_is_not(tracer):
    lines: list[str] = []
    memory_traces.trace_of(step_of(), lines.append)
    memory_traces.trace_of(step_of(), lines.append)
    assert lines == ["estimating the memory of a step of vit at 16 px, bf16, ZeRO 2 (once per config) …"]


def test_wait_for_another_process_is_reported_with_what_it_traces(tracer):
    """The other process holds the lock until it reads a line."""
    code = (
        "import models, sys\n"
        "from pipeline.extras.plan import memory_traces\n"
        "from pipeline.training_config import TrainConfig\n"
        "cfg = TrainConfig(steps=1, micro_batch=4, batch_size=16, zero=3)\n"
        "model = models.config_of('mu/8', 24, 10)\n"
        "step = memory_traces.step_to_trace(cfg, model, 2, 2, 1, is_gpu=False)\n"
        "memory_traces.traces_folder().mkdir(parents=True)\n"
        "with memory_traces.only_tracer(memory_traces.traces_folder() / 'lock', step, print):\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=memory_traces.ROOT
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"

        def report(text: str) -> None:
            lines.append(text)
            if text.startswith("waiting"):
                other.stdin.write("\n")
                other.stdin.flush()

        memory_traces.trace_of(step_of(), report)
    assert lines == [
        f"waiting for process {other.pid}, which estimates the memory of a step of vit at 24 px, bf16, ZeRO 3, "
        "1 recomputed block …",
        "estimating the memory of a step of vit at 16 px, bf16, ZeRO 2 (once per config) …",
    ]
    assert (memory_traces.traces_folder() / "lock").read_text() == "", "nobody holds the lock any more"


def test_least_recently_used_traces_are_deleted(tracer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_traces, "MAX_KEPT", 3)
    steps = []
    for number in range(4):
        step = step_of(world=2**number)
        steps.append(step)
        memory_traces.trace_of(step)
        os.utime(memory_traces.path_of(step), (number, number))
    memory_traces.trace_of(step_of(world=16))
    assert [memory_traces.cached_trace(step) is not None for step in steps] == [False, False, True, True]
    # Use one of the two again: the other is then evicted first.
    for number, step in enumerate(steps[2:]):
        os.utime(memory_traces.path_of(step), (number, number))
    memory_traces.trace_of(steps[2])
    memory_traces.trace_of(step_of(world=32))
    assert memory_traces.path_of(steps[2]).exists()
    assert not memory_traces.path_of(steps[3]).exists()


def test_plan_of_a_sweep_traces_each_distinct_step_once(tracer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """16 runs of four models: a step's memory does not depend on seeds, rates, decay or dropout."""
    runs = {}
    for width, dropout, decay in itertools.product((48, 96), (0.0, 0.1), (0.03, 0.3)):
        fields = {"model.width": width, "model.dropout": dropout, "optim.lr": decay, "optim.weight_decay": decay}
        runs[f"{width}-{dropout}-{decay}"] = fields
    section = {"data": {"train": "not/there"}, "steps": 4, "batch_size": 8, "micro_batch": 4, "precision": "fp32"}
    model = {"name": "mu/8", "image_size": 16, "classes": 10, "depth": 1, "mlp": 96, "heads": 3}
    section["optim"] = {"schedule": {"warmup_steps": 1}}
    section |= {"model": model, "sweep": {"each": runs, "seeds": [0, 1]}}
    recipe = tmp_path / "sweep.yaml"
    cluster = {"workers": 1, "backend": "processes"}
    recipe.write_text(json.dumps({"run": str(tmp_path / "run"), "cluster": cluster, "pretrain": section}))
    assert main(["plan", str(recipe), "--without-data"]) == 0
    assert capsys.readouterr().out.count("  memory  ") == 16
    assert len(tracer) == 4
