"""Tests that need a GPU (`make gpu`); each has a rehearsal on the CPU, as far as possible.

A test marked `gpu` is skipped if torch sees no GPU. Its rehearsal runs the same lines with what a CPU has in
place of NCCL, fused kernels and pinned memory: it shows that the test can run, but nothing about a GPU.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import models
from jobs.cluster import supervisor
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from jobs.run.session import run_campaign
from models.vit import attend
from pipeline import process_group
from pipeline.monitoring.telemetry import read_metrics
from pipeline.optimization import OptimConfig, build_optimizer
from tests.support import campaigns, on_device

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [GPU, "cpu"]
DEVICES_SLOW = [GPU, pytest.param("cpu", marks=pytest.mark.slow)]  # for tests that start workers or compile
# Without it cuBLAS may add in a different order each time, and torch raises in deterministic mode.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def workers_on(device: str) -> int:
    """Return the number of workers: the GPUs of this machine that divide a batch of 8, or two processes on a CPU."""
    if device == "cpu":
        return 2
    count = 1
    while 2 * count <= min(torch.cuda.device_count(), on_device.BATCH):
        count *= 2
    return count


def cluster_of(device: str, workers: int, **options: Any) -> ClusterConfig:
    return ClusterConfig(workers=workers, backend="processes", gpus_per_worker=int(device == "cuda"), **options)


class Operators(TorchDispatchMode):
    """Records the names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(operator._schema.name)
        return operator(*args, **(kwargs or {}))


# cuDNN's has the same algorithm; which of the two torch uses depends on the GPU.
FLASH = {
    "cuda": {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"},
    "cpu": {"aten::_scaled_dot_product_flash_attention_for_cpu"},
}


@pytest.mark.parametrize("queries", [None, 1], ids=["all tokens", "class token alone"])
@pytest.mark.parametrize("head", [64, 80], ids=["B/16 and L/16", "H/14"])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_uses_a_flash_kernel_forward_and_backward(device, head, queries):
    """On a CPU in float32: in bfloat16 two plain products are faster there (models/vit.py)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 50, head, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    with Operators() as operators:
        mixed = attend(q[:, :, :queries], k, v)
        mixed.sum().backward()
    chosen = {name for name in operators.names if "scaled_dot_product" in name}
    forward = {name for name in chosen if "backward" not in name}
    assert len(forward) == 1, chosen
    assert forward <= FLASH[device], chosen
    assert len(chosen) == 2, "the backward pass has a kernel too"

    # The same in float64, written out.
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (q, k, v)]
    weights = (exact[0][:, :, :queries] @ exact[1].mT / head**0.5).softmax(-1)
    expected = weights @ exact[2]
    expected.sum().backward()
    tolerance = 2e-2 if device == "cuda" else 1e-5
    assert off_by(mixed, expected) < tolerance
    for tensor, exact_tensor in zip((q, k, v), exact, strict=True):
        assert off_by(tensor.grad, exact_tensor.grad) < tolerance


def off_by(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest expected number."""
    difference = (tensor.detach().double().cpu() - expected.detach()).abs().max()
    return float(difference / expected.detach().abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_adamw_is_fused_only_on_a_gpu_and_follows_the_formula(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5, bias=False).to(device)
    optimizer = build_optimizer(model, {"weight"}, OptimConfig(lr=0.01, weight_decay=0.1))
    assert bool(optimizer.defaults["fused"]) == (device == "cuda")

    weight = model.weight.detach().double().cpu()
    mean = torch.zeros_like(weight)
    square = torch.zeros_like(weight)
    for step in range(1, 6):
        gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        model.weight.grad = gradient.to(device)
        optimizer.step()
        # Loshchilov and Hutter 2019, algorithm 2, with torch's defaults for the betas and epsilon.
        mean = 0.9 * mean + 0.1 * gradient.double()
        square = 0.999 * square + 0.001 * gradient.double() ** 2
        update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update
    torch.testing.assert_close(model.weight.detach().double().cpu(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES_SLOW)
def test_compiled_blocks_match_logits_and_gradients_of_plain_ones(device):
    torch.manual_seed(0)
    images = torch.randn(2, 3, on_device.SIDE, on_device.SIDE, device=device)
    results = []
    for is_compiled in (False, True):
        model = on_device.small_vit().to(device)
        if is_compiled:
            models.compile_blocks(model)
        logits = model(images)
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)


def test_all_process_groups_are_bound_to_the_workers_gpu(monkeypatch):
    """Check torch's process group without a network, with LOCAL_RANK different from the rank; NCCL is not started.

    By default, if the first collective is a barrier, NCCL uses the GPU numbered like the global rank.
    """
    form = dist.init_process_group
    asked = []

    def form_without_network(backend: str, **options: Any) -> None:
        asked.append(backend)
        form("fake", store=FakeStore(), rank=3, world_size=4, **options)

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    # Torch compares the device with the accelerators of this machine.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "init_process_group", form_without_network)
    monkeypatch.setattr(dist, "new_group", dist.new_group)  # restores what `join_group` replaces
    without_deepspeed = SimpleNamespace(init_distributed=lambda **_: None)
    monkeypatch.setattr(process_group, "import_deepspeed", lambda: without_deepspeed)
    own = torch.device("cuda", 1)
    try:
        assert process_group.join_group(60.0) == own
        assert asked == ["nccl"]
        assert dist.group.WORLD.bound_device_id == own
        assert dist.new_group([2, 3]).bound_device_id == own
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=DEVICES_SLOW)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Train, save and restore in a group; return the device and the observations of every worker."""
    folder = tmp_path_factory.mktemp("trained")
    seen = run_worker_group(
        on_device.train_save_and_restore,
        {"folder": str(folder)},
        cluster=cluster_of(request.param, workers_on(request.param)),
        name="group",
        directory=folder,
    )
    return request.param, seen


def test_workers_use_nccl_with_one_gpu_each(trained):
    device, seen = trained
    world = len(seen)
    expected_sum = [world * (world + 1) / 2] * 3
    for rank, worker in enumerate(seen):
        assert worker["backend"] == {"cuda": "nccl", "cpu": "gloo"}[device]
        assert worker["device"] == {"cuda": f"cuda:{rank}", "cpu": "cpu"}[device]
        assert worker["sum"] == expected_sum


@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_every_zero_stage_trains_fused_and_restores_through_pinned_memory(trained, zero):
    device, seen = trained
    for worker in seen:
        stage = worker["stages"][zero]
        assert stage["is_restored"], "every master and moment to the bit"
        assert stage["is_fused"] == stage["is_pinned"] == (device == "cuda")
        assert all(0 < loss < 20 for loss in stage["losses"])
    assert seen[0]["stages"][zero]["losses"] == pytest.approx(seen[0]["stages"]["1"]["losses"], rel=2e-2)


@pytest.mark.parametrize("device", DEVICES_SLOW)
def test_exact_parts_give_the_same_bits_twice_and_at_every_world_size(device, tmp_path):
    digests = set()
    for world in {1, workers_on(device)}:
        seen: Any = run_worker_group(
            on_device.train_exactly,
            {"zero": 2},
            cluster=cluster_of(device, world, environment=DETERMINISTIC),
            name=f"world-{world}",
            directory=tmp_path,
        )
        assert seen["device"] == device
        digests |= set(seen["digests"])
    assert len(digests) == 1


@pytest.mark.parametrize("device", DEVICES_SLOW)
def test_out_of_memory_error_is_recognised_by_its_message(device, tmp_path):
    """The driver then adds advice on what to lower (`restarts.LESS_MEMORY`; whole runs: test_checkpoint_runs.py)."""
    with pytest.raises(WorkerGroupError) as error:
        run_worker_group(
            on_device.run_out_of_memory, {}, cluster=cluster_of(device, 1), name="group", directory=tmp_path
        )
    assert any(word in error.value.cause for word in supervisor.OUT_OF_MEMORY), error.value.cause
    if device == "cuda":
        assert error.value.kind == "OutOfMemoryError"


@pytest.mark.parametrize("device", DEVICES_SLOW)
def test_run_trains_in_bf16_commits_and_is_evaluated(device, recipe):
    overrides = [
        "pretrain.precision=bf16",
        "pretrain.zero=2",
        f"cluster.gpus_per_worker={int(device == 'cuda')}",
        f"cluster.workers={min(workers_on(device), 4)}",
        f"pretrain.compile={str(device == 'cuda').lower()}",
    ]
    loaded = campaigns.load(recipe, overrides)
    run_campaign(loaded, only="pretrain", quiet=True)
    folder = loaded.directory(loaded.stage("pretrain"))
    losses = [loss for record in read_metrics(folder) for loss in record["losses"]]
    assert len(losses) == 24
    assert losses[-1] < losses[0]
    assert read_metrics(folder, "evaluate")[-1]["accuracy"] > 0.1
    said = (folder / "log.txt").read_text()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    assert f"workers on {name}" in said
    assert "checkpoint step 24 committed" in said
