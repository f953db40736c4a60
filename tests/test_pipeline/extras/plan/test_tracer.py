"""The memory tracer agrees with calculations by hand."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import _disable_current_modes

import models
from pipeline.config import build as build_config
from pipeline.extras.plan import memory, memory_traces
from pipeline.extras.plan.memory import GIB, memory_need, need_if_traced, recomputed_blocks
from pipeline.extras.plan.memory_traces import (
    Kind,
    MemoryTrace,
    Moment,
    StepToTrace,
    TraceFailed,
    step_to_trace,
    trace_in,
)
from pipeline.extras.plan.tracer import LiveBytes, copied_by_gloo, peak_moments, upper_hull
from pipeline.optimization import OptimConfig
from pipeline.training_config import DataConfig, TrainConfig

KIB = 1024
TINY = models.config_of("mu/8", 16, 10)


def numbers(kib: int) -> Tensor:
    """Return a tensor of this many KiB in fp32."""
    return torch.zeros(kib * KIB // 4)


def living(live: LiveBytes) -> dict[Kind, int]:
    """Return the allocated bytes by kind, without empty kinds."""
    sums: dict[Kind, int] = {}
    for _, kind, size in live.events:
        sums[kind] = sums.get(kind, 0) + size
    return {kind: size for kind, size in sums.items() if size}


class Collective:
    """Replaces a torch collective; `look` is called while it runs."""

    def __init__(self, name: str, look: Any = None) -> None:
        self._name = name
        self._look = look

    def name(self) -> str:
        return self._name

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if self._look is not None:
            self._look()


# ------------------------------------------------------------------------------------------ what is not seen of a step


def test_traced_gloo_copies_are_complete():
    """8 MiB of each: test_gloo_allocates_beside_a_collective_… (slow) counts the same with torch's allocator."""
    whole = torch.zeros(2 * KIB * KIB, device="meta")
    half = torch.zeros(KIB * KIB, device="meta")

    def copied(name: str, *arguments: Any) -> int:
        return sum(tensor.nbytes for tensor in copied_by_gloo(name, arguments))

    assert copied("c10d::_reduce_scatter_base_", half, whole) == 8 * KIB * KIB
    assert copied("c10d::_allgather_base_", whole, half) == 8 * KIB * KIB
    assert copied("c10d::allgather_", [list(whole.chunk(2))], [half]) == 8 * KIB * KIB
    for name in ("allreduce_", "broadcast_", "send", "recv_", "barrier"):
        assert copied(f"c10d::{name}", [whole]) == 0, name
    assert copied("aten::mul") == 0
    for name in ("_c10d_functional::all_reduce", "c10d::alltoall_"):
        with pytest.raises(AssertionError, match=f"{name}: unknown memory use of this collective in gloo"):
            copied(name, whole)


def test_gloo_copies_are_live_during_the_collective():
    during = []
    with LiveBytes(over_gloo=True) as live:
        live.enter("backward")
        whole = numbers(8)
        half = numbers(4)
        reduce_scatter: Any = Collective("c10d::_reduce_scatter_base_", lambda: during.append(living(live)))
        # torch calls this method without the mode: tensors made inside are not tracked by themselves.
        with _disable_current_modes():
            live.__torch_dispatch__(reduce_scatter, (), (half, whole))
    assert during == [{Kind.GRADIENTS: (8 + 4 + 8) * KIB}]
    assert living(live) == {Kind.GRADIENTS: (8 + 4) * KIB}


@pytest.mark.parametrize(("reduction", "most", "kept"), [("sum", 2, 1), ("mean", 2, 1), ("none", 1, 1)])
def test_reduced_squared_error_allocates_two_tensors_and_keeps_one(reduction, most, kept):
    """KiB, of predictions of 1 KiB: test_a_squared_error_takes_… (slow) counts the sum's with torch's allocator."""
    with FakeTensorMode(), LiveBytes() as live:
        predictions = numbers(1)
        answers = numbers(1)
        live.events = []
        loss = mse_loss(predictions, answers, reduction=reduction)
        sizes = [size for _, _, size in live.events]
    assert loss.shape == (predictions.shape if reduction == "none" else ())
    assert max(itertools.accumulate(sizes)) == most * KIB
    assert sum(sizes) == kept * KIB


# -------------------------------------------------------------------------------------------------- what memory is for


def test_memory_has_the_kind_of_its_phase():
    kinds = {}
    with LiveBytes() as live:
        for phase in ("build", "batch", "forward", "backward", "update"):
            live.enter(phase)
            made = numbers(1).requires_grad_()
            (kinds[phase],) = living(live)
            del made
        live.enter("forward")
        # ZeRO 3 gathers weights in hooks of the forward pass, without recording gradients.
        with torch.no_grad():
            made = numbers(1)
        assert living(live) == {Kind.GATHERED: KIB}
        del made
    assert kinds == {
        "build": Kind.STATES,
        "batch": Kind.IMAGES,
        "forward": Kind.ACTIVATIONS,
        "backward": Kind.GRADIENTS,
        "update": Kind.GRADIENTS,
    }


def test_recomputation_in_the_backward_pass_creates_activations_and_may_stop_early():
    class Block(nn.Module):
        def forward(self, is_last: bool) -> Tensor:
            made = numbers(1)
            if is_last:
                raise StopIteration  # as torch does after the last tensor it needs
            return made

    block = Block()
    with LiveBytes() as live:
        live.watch(block)
        live.enter("forward")
        kept = [block(False)]
        kept.append(numbers(2))
        assert living(live) == {Kind.ACTIVATIONS: 3 * KIB}, "the first pass is none of the second"
        live.enter("backward")
        live.events = []
        kept.append(block(False))
        kept.append(numbers(4))
        assert living(live) == {Kind.ACTIVATIONS: KIB, Kind.GRADIENTS: 4 * KIB}
        with pytest.raises(StopIteration):
            block(True)
        live.events = []
        kept.append(numbers(8))
        assert living(live) == {Kind.GRADIENTS: 8 * KIB}


def test_gathered_weights_are_neither_states_nor_activations():
    gather: Any = Collective("c10d::_allgather_base_")
    with LiveBytes() as live:
        states = numbers(1)
        live.__torch_dispatch__(gather, (), (states, states))
        live.enter("forward")
        live.__torch_dispatch__(gather, (), (states, states))
        assert living(live) == {Kind.STATES: KIB}, "what the engine was built with stays its own"
        gathered = numbers(2).requires_grad_()
        live.__torch_dispatch__(gather, (), (gathered, states))
        assert living(live) == {Kind.STATES: KIB, Kind.GATHERED: 2 * KIB}
        other: Any = Collective("c10d::allreduce_")
        reduced = numbers(4).requires_grad_()
        live.__torch_dispatch__(other, (), (reduced, states))
        assert living(live)[Kind.ACTIVATIONS] == 4 * KIB
        del gathered
        assert Kind.GATHERED not in living(live), "it goes as what it was for at the end"


def test_resized_storage_counts_at_its_new_size_and_meta_tensors_do_not_count():
    with LiveBytes() as live:
        live.enter("backward")
        shape_alone = torch.zeros(KIB, device="meta")
        tensor = numbers(1)
        tensor.resize_(KIB)
        assert living(live) == {Kind.GRADIENTS: 4 * KIB}
        del tensor
        assert living(live) == {}
        assert shape_alone.numel() == KIB


def test_step_with_fake_tensors_continues_as_if_all_values_were_finite():
    with FakeTensorMode(), LiveBytes():
        assert float(torch.zeros(())) == 1.0, "a norm or loss, finite"
        assert bool(torch.ones((), dtype=torch.bool)) is False
        assert int(torch.full((), 5)) == 0
    with LiveBytes():
        assert float(torch.full((), 5.0)) == 5.0, "with numbers, they are the real ones"


# ------------------------------------------------------------------------------------------------ the peak moments

Events = list[tuple[str, Kind, int]]

BUILT: Events = [
    ("build", Kind.STATES, 100),
    ("build", Kind.STATES, 50),
    ("update", Kind.GRADIENTS, 30),
    ("update", Kind.GRADIENTS, -30),
]


def events_of_step(images: int) -> Events:
    """Return a handmade step: activations take 7 bytes plus 20 per image, the gradient 60, the optimizer 200 more."""
    return [
        ("batch", Kind.IMAGES, 10 * images),
        ("forward", Kind.ACTIVATIONS, 7 + 20 * images),
        ("backward", Kind.GRADIENTS, 60),
        ("backward", Kind.ACTIVATIONS, -7 - 20 * images),
        ("update", Kind.GRADIENTS, 200),
        ("update", Kind.GRADIENTS, -260),
        ("update", Kind.IMAGES, -10 * images),
    ]


def test_trace_gives_the_peak_for_every_micro_batch():
    """By hand: 150 + 67 + 30 n bytes in the backward pass, 150 + 260 + 10 n in the update; equal at 9.65 images."""
    found = trace_in(json.dumps(peak_moments(BUILT, events_of_step(2), events_of_step(3))))
    assert found is not None
    assert found.start == 180
    assert found.peak(9).phase == "update"
    assert found.peak(9).parts(9) == [150, 0, 260, 0, 90]
    assert found.peak(10).phase == "backward"
    assert found.peak(10).parts(10) == [150, 207, 60, 0, 100]
    assert found.peak_activations(10) == 207


def test_step_whose_order_depends_on_the_micro_batch_is_rejected():
    other = events_of_step(3)
    other[1], other[2] = other[2], other[1]
    with pytest.raises(AssertionError, match="a step's order depends on the micro-batch"):
        peak_moments(BUILT, events_of_step(2), other)


def test_upper_hull_is_the_maximum_of_all_lines():
    draws = np.random.default_rng(0)
    for _ in range(50):
        fixed = draws.integers(0, 1000, 12).astype(float)
        slope = draws.integers(0, 50, 12).astype(float)
        kept = upper_hull(fixed, slope)
        for images in range(1, 100):
            highest = max(fixed + slope * images)
            assert max(fixed[place] + slope[place] * images for place in kept) == highest


# ------------------------------------------------------------------------------------------ what a trace depends on


def step_of(world: int = 2, accumulation: int = 4, **changes: Any) -> StepToTrace:
    values = {"steps": 1, "micro_batch": 4, "batch_size": 4 * world * accumulation, **changes}
    return step_to_trace(TrainConfig(**values), TINY, world, accumulation, 0, is_gpu=False)


def test_trace_depends_only_on_settings_that_affect_memory(tmp_path: Path):
    plain = step_of()
    with_a_say = {
        "objective": "masked",
        "loss": "softmax",
        "label_smoothing": 0.1,
        "mixup": 0.1,
        "polyak": 0.9,
        "exact_parts": 4,
        "precision": "fp32",
        "zero": 3,
        "data": DataConfig(train="x", max_labels=3),
    }
    for name, value in with_a_say.items():
        step = step_of(**{name: value})
        assert step != plain, name
        build_config(TrainConfig, step.config, "config")  # as the tracer does; mixup, for example, needs two images
    # It matters whether gradients are clipped and weights decay, but not at which norm and rate.
    for change in ({"name": "sgd"}, {"clip": 0.0}, {"weight_decay": 0.0}, {"head_weight_decay": 0.0}):
        assert step_of(optim=OptimConfig(**change)) != step_of(optim=OptimConfig()), change
    assert step_of(optim=OptimConfig(clip=7.0, lr=0.5, weight_decay=0.5)) == step_of(optim=OptimConfig(clip=1.0))
    without_a_say = {"steps": 7, "seed": 3, "save_every": 9, "data": DataConfig(train="another")}
    for name, value in without_a_say.items():
        assert step_of(**{name: value}) == plain, name
    # A DeepSpeed settings file is identified by its content, not only by its name.
    file = tmp_path / "ds.json"
    file.write_text("{}")
    before = step_of(deepspeed=str(file))
    file.write_text('{"zero_optimization": {}}')
    assert len({before.file, step_of(deepspeed=str(file)).file, plain.file}) == 3


@pytest.mark.parametrize(
    ("world", "accumulation", "parts", "micro_batches"),
    [
        (2, 1, 0, 1),
        (2, 5, 0, 2),  # a third one uses the same sums as the second
        (2, 4, 8, 4),  # four parts here, one micro-batch each
        (2, 12, 8, 8),  # three each, of which two are traced
        (1, 4, 4, 4),
    ],
)
def test_only_as_many_micro_batches_are_traced_as_affect_memory(world, accumulation, parts, micro_batches):
    step = step_of(world, accumulation, exact_parts=parts)
    assert step.accumulation == micro_batches
    assert step.config["batch_size"] == world * micro_batches * step.config["micro_batch"]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[memory_traces.Tracer]]:
    """The running tracer of this test, at first none; the cache is empty."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path))
    running: list[memory_traces.Tracer] = []
    monkeypatch.setattr(memory_traces, "TRACERS", running)
    yield running
    for tracer in running:
        tracer.close()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("raise RuntimeError('no such operator')", "RuntimeError: no such operator"),
        (
            "input(); print('first\\nRuntimeError: killed', file=sys.stderr, flush=True); print()",
            "RuntimeError: killed",
        ),
        (
            "input(); print('Traceback:\\n  line\\nConfigError: a\\n  set b', file=sys.stderr, flush=True); print()",
            "step: ConfigError: a set b",
        ),
        ("", "no error output"),
        ("input(); print({})", "the tracer printed unexpected output: {}"),
        ("input(); print('no JSON')", "the tracer printed unexpected output: no JSON"),
        ("print(*map(os.environ.get, ['DS_ACCELERATOR', 'CUDA_VISIBLE_DEVICES']), '.')", "output: cpu  ."),
        ("print('file' in json.loads(input()))", "output: False"),
    ],
)
def test_failed_tracer_raises_an_error_and_caches_nothing(program, expected, processes, monkeypatch):
    command = (sys.executable, "-c", f"import json, os, sys; {program}")
    monkeypatch.setattr(memory_traces.Tracer, "COMMAND", command)
    with pytest.raises(TraceFailed, match=expected):
        memory_traces.trace_of(step_of())
    assert memory_traces.cached_trace(step_of()) is None


@pytest.mark.slow
def test_one_process_traces_all_steps_and_is_replaced_after_its_end(processes):
    steps = [step_of(2, 2, zero=zero) for zero in (1, 2)]
    first, second = map(memory_traces.run_tracer, steps)
    assert first != second
    assert memory_traces.run_tracer(steps[0]) == first, "a trace does not depend on earlier ones"
    (tracer,) = processes
    tracer.process.kill()
    tracer.process.wait()
    assert memory_traces.run_tracer(steps[1]) == second
    assert processes != [tracer]


def test_a_step_that_fails_does_not_end_the_process(processes):
    step = step_of()
    broken = dataclasses.replace(step, model={**step.model, "family": "none"})
    with pytest.raises(TraceFailed, match=r"could not trace the step: .*none"):
        memory_traces.run_tracer(broken)
    (tracer,) = processes
    assert memory_traces.run_tracer(step)
    assert processes == [tracer]


# ------------------------------------------------------------------------------------------------- what a worker needs


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[StepToTrace]:
    """Let steps need 8 GiB at the start, 1 GiB later, and 1 GiB per image, or half if all blocks are recomputed."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path))
    steps_asked: list[StepToTrace] = []

    def trace(step: StepToTrace, report: Callable[[str], None]) -> MemoryTrace:
        steps_asked.append(step)
        moment = Moment("backward", (GIB, 0, 0, 0, 0), (0, GIB * (1 - step.recomputed / 24), 0, 0, 0))
        return MemoryTrace(8 * GIB, (moment,), (moment,))

    monkeypatch.setattr(memory, "trace_of", trace)
    return steps_asked


def test_peak_at_startup_counts_and_is_described(asked):
    model = models.config_of("B/16", 224, 10)
    cfg = TrainConfig(steps=1, micro_batch=4, batch_size=4)
    need = memory_need(cfg, model, 1, is_gpu=False)
    assert need.device_bytes == 8 * GIB
    words = memory.describe_need(need, is_gpu=False)
    assert words.startswith(
        "tensors of 8.0 GiB per worker, peak at startup; later 4.0 GiB activations + 1.0 GiB weights and optimizer; "
        "in addition "
    )
    assert words.endswith(
        "about 200 MiB for Python and its libraries, and 800 MiB once per machine for the fork server and the driver"
    )
    # The later peak, with 16 images.
    need = memory_need(dataclasses.replace(cfg, micro_batch=16, batch_size=16), model, 1, is_gpu=True)
    assert need.device_bytes == 17 * GIB
    words = memory.describe_need(need, is_gpu=True)
    assert words.startswith("17.0 GiB per worker, peak in backward: 16.0 GiB activations + 1.0 GiB weights")
    assert " (with flash attention, without the CUDA context); host memory: " in words


def test_each_decoding_process_prefetches_two_batches(asked):
    """By hand: 4 images of 224 px and a label of 8 bytes each are 602,112 + 32 bytes."""
    model = models.config_of("B/16", 224, 10)
    data = DataConfig(train="x", processes=3)
    cfg = TrainConfig(steps=1, micro_batch=4, batch_size=4, data=data)
    # On a CPU the step borrows one of these batches at a time, which already counts as the step's memory.
    assert memory_need(cfg, model, 1, is_gpu=False).loader == (3 * 3 - 1) * (602_112 + 32)
    alone = dataclasses.replace(cfg, data=dataclasses.replace(data, processes=0))
    assert memory_need(alone, model, 1, is_gpu=False).loader == 602_112 + 32


def test_recomputed_blocks_are_limited_to_the_depth(asked):
    model = models.config_of("B/16", 224, 10)
    cfg = TrainConfig(steps=1, micro_batch=4, batch_size=64)
    assert recomputed_blocks(dataclasses.replace(cfg, checkpoint_blocks=40), model) == 12
    assert recomputed_blocks(dataclasses.replace(cfg, checkpoint_blocks=5), model) == 5
    assert asked == []


def test_startup_check_uses_only_cached_traces(asked, monkeypatch):
    cfg = TrainConfig(steps=1, micro_batch=4, batch_size=4)
    assert need_if_traced(cfg, TINY, 1, is_gpu=True) is None
    monkeypatch.setattr(memory, "cached_trace", lambda step: "a trace")
    assert need_if_traced(dataclasses.replace(cfg, compile=True), TINY, 1, is_gpu=True) is None
    assert asked == []
    need = need_if_traced(cfg, TINY, 1, is_gpu=True)
    assert need is not None
    assert need.device_bytes == 8 * GIB
