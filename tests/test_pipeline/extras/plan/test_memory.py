"""Planned memory agrees with the allocator's counts in real steps, and with calculations by hand."""

import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import models
from benchmarks.memory import CASES, counting_allocator, measured, planned
from data.errors import ConfigError
from jobs.__main__ import main
from jobs.extras.planning.preflight import stage_requirements
from pipeline.batches import patches_to_keep
from pipeline.extras.plan import memory, memory_traces
from pipeline.extras.plan.memory import GIB, check_fits, fewest_blocks, least_bytes, memory_need
from pipeline.extras.plan.memory_traces import Kind, MemoryTrace
from pipeline.extras.plan.tracer import LiveBytes, TracedData, TracedGroup, TracedWorker, copied_by_gloo
from pipeline.start import Worker
from pipeline.training_config import TrainConfig
from pipeline.worker import Group, StageData
from tests.support.campaigns import load
from tests.support.hand_traces import trace_by_hand

MIB = 2**20


@pytest.fixture(autouse=True)
def untraced(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace steps for real, into a separate folder of this session."""
    folder = tmp_path_factory.getbasetemp() / "traces"
    monkeypatch.setenv("PATCHLINE_CACHE", str(folder))


# ------------------------------------------------------------------------------------------ against the allocator


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_memory_equals_the_allocated_memory(case):
    assert planned(case).device_bytes == pytest.approx(measured(case), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_quick_lower_bound_is_below_the_planned_memory(case):
    assert least_bytes(case.cfg, case.model_config, case.world) <= planned(case).device_bytes


def count_collectives(rank: int, folder: str) -> None:
    """Record the additional bytes allocated during each collective with 8 MiB."""
    counter = counting_allocator()
    counter.start_counting()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    whole = torch.zeros(2 * MIB)
    half = torch.zeros(MIB)
    collectives = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(half, whole),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, half),
        "all_gather": lambda: dist.all_gather(list(whole.chunk(2)), half),
    }
    more = {}
    for name, collective in collectives.items():
        # gloo's thread frees the memory of the previous collective.
        deadline = time.monotonic() + 60
        while counter.living_bytes() > 12 * MIB:
            assert time.monotonic() < deadline, f"{counter.living_bytes()} bytes live, expected {12 * MIB}"
            time.sleep(0.01)
        counter.forget_most()
        collective()
        more[name] = counter.most_bytes() - 12 * MIB
    Path(folder, f"{rank}.json").write_text(json.dumps(more))
    dist.destroy_process_group()


@pytest.mark.slow
def test_traced_gloo_buffers_equal_the_allocated_ones(tmp_path):
    counting_allocator()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=count_collectives, args=(rank, str(tmp_path))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    more = json.loads((tmp_path / "0.json").read_text())
    whole = torch.zeros(2 * MIB, device="meta")
    half = torch.zeros(MIB, device="meta")
    operators = {
        "all_reduce": ("c10d::allreduce_", ([whole],)),
        "broadcast": ("c10d::broadcast_", ([whole],)),
        "reduce_scatter_tensor": ("c10d::_reduce_scatter_base_", (half, whole)),
        "all_gather_into_tensor": ("c10d::_allgather_base_", (whole, half)),
        "all_gather": ("c10d::allgather_", ([list(whole.chunk(2))], [half])),
    }
    for name, (operator, arguments) in operators.items():
        copied = sum(tensor.numel() * tensor.element_size() for tensor in copied_by_gloo(operator, arguments))
        assert more[name] == copied, name


def count_squared_error(folder: str) -> None:
    """Record the memory of a mean squared error of 1 MiB: the peak, and the bytes kept while its result exists."""
    counter = counting_allocator()
    predictions = torch.zeros(MIB // 4, requires_grad=True)
    answers = torch.zeros(MIB // 4)
    counter.start_counting()
    loss = torch.nn.functional.mse_loss(predictions, answers, reduction="sum")
    Path(folder, "counted.json").write_text(json.dumps([counter.most_bytes(), counter.living_bytes()]))
    del loss


@pytest.mark.slow
def test_traced_memory_of_a_squared_error_equals_the_allocated_memory(tmp_path):
    counting_allocator()
    process = multiprocessing.get_context("fork").Process(target=count_squared_error, args=(str(tmp_path),))
    process.start()
    process.join()
    most, kept = json.loads((tmp_path / "counted.json").read_text())
    with FakeTensorMode(), LiveBytes() as live:
        predictions = torch.zeros(MIB // 4, requires_grad=True)
        answers = torch.zeros(MIB // 4)
        live.events = []
        loss = torch.nn.functional.mse_loss(predictions, answers, reduction="sum")
        sizes = [size for _, _, size in live.events]
    assert loss.shape == ()
    assert max(itertools.accumulate(sizes)) == pytest.approx(most, abs=64)
    assert sum(sizes) == pytest.approx(kept, abs=64)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gib"), [("B/16", 3.25), ("H/14", 19.6)])
def test_gpu_activations_are_those_of_fused_attention(name, gib):
    """64 images in bf16, against torch's own MemTracker over fake CUDA tensors."""
    cfg = TrainConfig(steps=1, micro_batch=64, batch_size=512)
    need = memory_need(cfg, models.config_of(name, 224, 1000), 8, is_gpu=True)
    assert need.parts[Kind.ACTIVATIONS] / GIB == pytest.approx(gib, rel=0.02)


# ---------------------------------------------------------------------------------------------------------- by hand


def test_memory_is_live_from_its_allocation_until_its_last_tensor_is_freed():
    with LiveBytes() as live:
        weight = torch.ones(256, 256, requires_grad=True)  # 256 KiB
        live.enter("forward")
        hidden = torch.ones(4, 256) @ weight  # twice 4 KiB
        views = hidden[1:].view(-1, 16)
        result = hidden.relu()  # keeps its result for the backward pass, not its input
        del hidden
        live.enter("backward")
        result.sum().backward()
        del views, result
    living = dict.fromkeys(Kind, 0)
    for _, kind, size in live.events:
        living[kind] += size
    assert living[Kind.STATES] == living[Kind.GRADIENTS] == 256 * 1024  # the weight; its gradient
    assert living[Kind.ACTIVATIONS] == 0
    assert max(size for _, kind, size in live.events if kind is Kind.ACTIVATIONS) == 4096


def test_traced_worker_has_all_fields_that_losses_use():
    cfg = TrainConfig(data=CASES[0].cfg.data, steps=1, batch_size=8, micro_batch=8)
    data = TracedData(cfg.phases(1, CASES[0].model_config))
    group = TracedGroup(torch.device("cpu"))
    worker: Any = TracedWorker(cfg, group, CASES[0].model_config, cast(Any, None), data)
    asked: Any = None
    assert patches_to_keep(worker, 0, asked) == []
    for traced, real in ((TracedWorker, Worker), (TracedGroup, Group), (TracedData, StageData)):
        of_traced = {field.name for field in dataclasses.fields(traced)}
        assert of_traced <= {field.name for field in dataclasses.fields(real)}


@pytest.mark.parametrize("limit", range(30, 130, 7))
def test_fewest_blocks_that_fit_are_found_with_few_traces(limit):
    needed = [100, 104, *range(95, 0, -5)]  # recomputing a single block saves nothing
    looks = []

    def look(blocks: int) -> float:
        looks.append(blocks)
        return needed[blocks]

    fitting = [blocks for blocks, size in enumerate(needed) if size <= limit]
    assert fewest_blocks(look, len(needed) - 1, limit) == fitting[0]
    assert len(looks) <= 6
    assert fewest_blocks(look, len(needed) - 1, needed[-1]) == len(needed) - 1
    assert fewest_blocks(look, len(needed) - 1, needed[-1] - 1) is None


# ---------------------------------------------------------------------------------------------------- what plan says


@pytest.fixture
def untraceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all traces fail."""

    def refuse(step: memory_traces.StepToTrace, report: Callable[[str], None]) -> MemoryTrace:
        raise memory_traces.TraceFailed("the step could not be traced: by hand")

    monkeypatch.setattr(memory, "trace_of", refuse)


def test_plan_and_preflight_continue_if_a_step_cannot_be_traced(recipe, capsys, untraceable):
    limited = ["cluster.gpus_per_worker=1", "cluster.gpu_memory_gb=5"]
    assert main(["plan", str(recipe), *limited]) == 0
    said = capsys.readouterr().out
    assert said.count("  memory  unknown: the step could not be traced: by hand") == 2
    assert "finetune: cannot determine whether it fits into cluster.gpu_memory_gb=5: the step could not" in said

    campaign = load(recipe, [])
    assert stage_requirements(campaign, campaign.stage("pretrain"), 2).memory_bytes is None


@pytest.fixture
def traced_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have the memory of `trace_by_hand`."""
    monkeypatch.setattr(memory, "trace_of", trace_by_hand)


def test_stage_that_does_not_fit_is_rejected_with_the_best_remedy_first(traced_by_hand):
    model = models.config_of("B/16", 224, 10)
    cfg = TrainConfig(steps=1, micro_batch=16, batch_size=64, zero=1)
    check_fits(cfg, model, 2, 18 * GIB, is_gpu=True, name="pretrain")
    with pytest.raises(ConfigError) as refused:
        check_fits(cfg, model, 2, 17 * GIB, is_gpu=True, name="pretrain")
    assert str(refused.value).splitlines() == [
        "pretrain: a worker needs 18.0 GiB of device memory, but only 17.0 GiB is free",
        "  set one of these: pretrain.micro_batch=8 (needs 10.0 GiB); pretrain.checkpoint_blocks=2 (needs 16.7 GiB); "
        "pretrain.zero=2 (needs 17.0 GiB)",
    ]
    # The largest fitting setting is suggested.
    with pytest.raises(ConfigError, match=r"set one of these: pretrain\.micro_batch=8 \(needs 10\.0 GiB\); "):
        check_fits(cfg, model, 2, 10 * GIB, is_gpu=True, name="pretrain")
    together = r"pretrain\.micro_batch=1 pretrain\.checkpoint_blocks=12 pretrain\.zero=3 together need 768\.0 MiB"
    with pytest.raises(ConfigError, match=together):
        check_fits(cfg, model, 2, GIB, is_gpu=True, name="pretrain")


@pytest.mark.parametrize(
    ("zero", "precision", "bytes_per_parameter"),
    [
        (1, "bf16", 2 + 2 + 12 / 4),
        (2, "bf16", 2 + (2 + 12) / 4),
        (3, "bf16", (2 + 2 + 12) / 4),
        (0, "fp32", 4 + 4 + 8),
        (1, "fp32", 4 + 4 + 8 / 4),
    ],
)
def test_lower_bound_counts_weights_gradients_and_optimizer_state_at_each_zero_stage(
    zero, precision, bytes_per_parameter
):
    """By hand: B/16 has 86,567,656 parameters; Adam has two moments and, in bf16, a master, in fp32."""
    cfg = TrainConfig(steps=1, micro_batch=16, batch_size=64, zero=zero, precision=precision)
    least = least_bytes(cfg, models.config_of("B/16", 224, 1000), 4)
    assert least == pytest.approx(86_567_656 * bytes_per_parameter, rel=1e-6)


def test_stage_whose_states_do_not_fit_is_rejected_without_a_trace(untraceable):
    """By hand: H/14 with 10 classes has 630,777,610 parameters, with 16 bytes each."""
    model = models.config_of("H/14", 224, 10)
    cfg = TrainConfig(steps=1, micro_batch=16, batch_size=64, zero=1)
    with pytest.raises(ConfigError) as refused:
        check_fits(cfg, model, 4, 4 * GIB, is_gpu=True, name="pretrain")
    assert str(refused.value).splitlines() == [
        "pretrain: a worker needs at least 4.1 GiB of device memory for weights, gradients and optimizer state alone, "
        "but only 4.0 GiB is free",
        "  use pretrain.zero=2 (needs at least 3.2 GiB); or pretrain.zero=3 (needs at least 2.3 GiB); or more workers "
        "with ZeRO 3, GPUs with more memory, or a smaller model",
    ]


def test_pinned_host_memory_is_rounded_up_to_powers_of_two(traced_by_hand):
    """By hand: 16 images of 224 px, 2,408,448 bytes, and their labels, 128; the master and two moments of B/16."""
    cfg = TrainConfig(steps=1, micro_batch=16, batch_size=64)
    model = models.config_of("B/16", 224, 1000)
    share = 86_567_656 * 4 * 3 / 4
    on_cpu = memory_need(cfg, model, 4, is_gpu=False)
    assert on_cpu.loader == 2_408_448 + 128
    assert on_cpu.snapshot == pytest.approx(share, rel=1e-3)
    on_gpu = memory_need(cfg, model, 4, is_gpu=True)
    assert on_gpu.loader == on_cpu.loader + 4 * MIB + 128
    assert on_gpu.snapshot == 256 * MIB
    # Half of the workers have twice the share, 495.4 MiB; a little more than half a GiB would take a whole one.
    assert memory_need(cfg, model, 2, is_gpu=True).snapshot == 512 * MIB
    assert [memory.pinned_bytes(size) for size in (1, 512, 513)] == [1, 512, 1024]
