"""DeepSpeed ZeRO 0–3 on gloo as Patchline uses it; these tests also guard every DeepSpeed upgrade."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from data.files import import_path
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.fork_server import MALLOC
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline import process_group
from pipeline.optimization import OptimConfig, build_optimizer
from tests.support import ranks

ROOT = Path(__file__).parents[3]
CASES = [(0, "fp32", 2), (1, "fp32", 2), (2, "fp32", 2), (3, "fp32", 2), (2, "fp32", 1)]
CASES += [(1, "bf16", 2), (2, "bf16", 2), (3, "bf16", 2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, int], Any]:
    folder = tmp_path_factory.mktemp("engine")
    found = {}
    for zero, precision, world in CASES:
        found[zero, precision, world] = run_worker_group(
            ranks.go_back_and_repeat,
            {"zero": zero, "precision": precision},
            cluster=ClusterConfig(workers=world, backend="processes"),
            name=f"{zero}-{precision}-{world}",
            directory=folder,
        )
    return found


def in_one_process(count: int = 6) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run the same steps in plain torch, with the average computed by hand.

    Losses are those of the first half of every batch, which belongs to worker 0 of two.
    """
    model = ranks.small_model()
    optimizer = build_optimizer(model, {"0.weight", "2.weight"}, OptimConfig(lr=1e-2))
    losses, average = [], {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(count):
        x, y = ranks.batch_of(step)
        losses.append(F.cross_entropy(model(x[:4]), y[:4]).item())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = {name: 0.9 * average[name] + 0.1 * p.detach() for name, p in model.named_parameters()}
    return losses, average


@pytest.mark.parametrize("case", CASES)
def test_restored_state_equals_the_saved_one_and_repeats_the_losses_bit_for_bit(results, case):
    assert results[case]["back"]
    assert results[case]["repeats"]
    assert results[case]["updates"] == 3


@pytest.mark.parametrize("case", CASES)
def test_non_finite_gradient_in_one_micro_batch_makes_all_workers_skip_the_step(results, case):
    """Use NaN, then infinity: weights, moments and average do not change, and all workers get the summed numbers."""
    assert results[case]["unharmed"]
    # At ZeRO 0 DeepSpeed does not count skipped steps.
    assert results[case]["skipped"] == (2 if case[0] else 0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks_at_every_stage_match_one_process(results, zero):
    assert results[zero, "fp32", 2]["losses"] == pytest.approx(in_one_process()[0], abs=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_averaged_uses_the_average_computed_by_hand(results, case):
    model = ranks.small_model()
    model.load_state_dict(in_one_process(3)[1])
    expected = model(ranks.batch_of(0)[0]).detach()
    found = torch.tensor(results[case]["averaged_logits"])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 if case[1] == "bf16" else 2e-6)
    other = ranks.small_model()(ranks.batch_of(0)[0]).detach()
    assert (expected - other).abs().max() > 4e-2, "the average has moved too little to tell"


def test_average_continues_from_a_checkpoint_of_another_world_size_and_stage(tmp_path: Path):
    averages = []
    for save, zero, world in ((True, 2, 2), (False, 3, 1)):
        task = {"zero": zero, "save": save, "folder": str(tmp_path / "checkpoints")}
        cluster = ClusterConfig(workers=world, backend="processes")
        found = run_worker_group(ranks.save_or_go_on, task, cluster=cluster, name=f"{world}", directory=tmp_path)
        assert found["restored"] is not save
        averages.append(found["average"])
    for name, expected in in_one_process()[1].items():
        for average in averages:
            torch.testing.assert_close(torch.tensor(average[name]), expected.flatten(), rtol=0, atol=2e-6)


def test_bf16_starts_from_the_unrounded_weights(results):
    masters = {results[zero, precision, 2]["initial"] for zero, precision, world in CASES if world == 2}
    assert len(masters) == 1


# Rounding a mean once to bf16 is 0.17 % of it; adding eight micro-batches of two workers in bf16 was 0.35 %.
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16_gradients_are_summed_over_micro_batches_and_workers_in_fp32(zero: int, tmp_path: Path):
    task = {"zero": zero, "accumulation": 4}  # dividing by 3 would round every gradient before it is summed
    cluster = ClusterConfig(workers=4, backend="processes")
    error = run_worker_group(ranks.error_of_the_mean, task, cluster=cluster, name="sum", directory=tmp_path)
    assert error < 1e-6


def test_bf16_has_the_same_bits_at_stages_1_and_2_even_after_a_skipped_step(results):
    assert results[1, "bf16", 2]["end"] == results[2, "bf16", 2]["end"]
    assert results[1, "bf16", 2]["behind"] == results[2, "bf16", 2]["behind"]
    assert results[1, "bf16", 2]["behind"] != results[1, "bf16", 2]["end"]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] > 0])
def test_reduction_bucket_is_not_larger_than_the_model(results, case):
    assert results[case]["bucket"] == 12 * 33 + 33 + 33 * 7 + 7


def test_error_of_one_worker_under_averaged_weights_is_reported_at_once(tmp_path: Path):
    """It used to wait for the others to restore the weights, while they waited for it in another collective."""
    began = time.monotonic()
    with pytest.raises(WorkerGroupError, match=r"worker 1 on .*: ValueError: alone"):
        run_worker_group(
            ranks.raise_alone,
            {"zero": 2},
            cluster=ClusterConfig(workers=2, backend="processes"),
            name="alone",
            directory=tmp_path,
        )
    assert time.monotonic() - began < 40, "the collective's time-out is 60 s"


def test_deepspeed_file_may_request_bf16_sums(tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text('{"communication_data_type": "bf16"}')
    error = run_worker_group(
        ranks.error_of_the_mean,
        {"zero": 2, "deepspeed": str(file)},
        cluster=ClusterConfig(workers=4, backend="processes"),
        name="sum",
        directory=tmp_path,
    )
    assert 2e-3 < error < 4e-3


@pytest.mark.parametrize("case", CASES)
def test_step_starts_no_process(results, case):
    assert results[case]["started"] == []


@pytest.mark.parametrize("case", CASES)
def test_torchs_linear_is_not_replaced(results, case):
    assert results[case]["linear_untouched"]


# Prints, for each variant, the page faults caused by returned memory, and the digest of the final weights.
BOTH_WAYS = """
import os
import resource
import threading

import torch

from pipeline import process_group
from pipeline.engine.deepspeed import import_deepspeed
from pipeline.engine.engine import Engine
from pipeline.engine.settings import deepspeed_config
from pipeline.optimization import OptimConfig
from tests.support.ranks import digest, whole_state

import_deepspeed()
torch.set_num_threads(1)
for way in ("given back", "kept"):
    if os.fork():
        os.wait()
        continue
    if way == "given back":
        process_group.keep_freed_memory = lambda: ""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    process_group.join_group(60.0)
    # Under Ray the loop is in a thread.
    thread = threading.Thread(target=lambda: print(process_group.keep_freed_memory(), end=""))
    thread.start()
    thread.join()
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [torch.full((2**24,), torch.nan) for _ in range(4)]
        del pieces
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # The weight, its gradient and each of its moments have 36 MB.
    draws = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3000, 3000)
    model.weight.data.normal_(generator=draws)
    model.bias.data.zero_()
    settings = deepspeed_config(zero=2, precision="fp32", micro_batch=2, accumulation=1, clip=1.0, user_file=None)
    engine = Engine(model, {"weight"}, OptimConfig(name="adam", lr=1e-2), settings, 0.0)
    for _ in range(3):
        loss = engine.forward(torch.randn(2, 3000, generator=draws)).square().mean()
        engine.backward(loss)
        engine.end_micro_batch(1e-2, torch.zeros(2, dtype=torch.float64))
    print(faults, digest(whole_state(engine)), flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back what mallopt can have it keep")
@pytest.mark.skipif(torch.cuda.is_available(), reason="workers on GPUs leave malloc as it is")
@pytest.mark.slow
def test_cpu_worker_keeps_freed_memory_without_changing_bits():
    """Use four tensors of 64 MiB: 65,536 pages of 4 KiB, which the kernel would zero at every step.

    Kept memory contains NaN, so a program that reads memory before writing it would end with other bits.
    """
    environment = os.environ | {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": import_path()} | MALLOC
    command = [sys.executable, "-c", BOTH_WAYS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    given_back, kept = (line.split() for line in done.stdout.splitlines()[-2:])
    # A warning of the thread would be printed before the number.
    assert int(kept[0]) < 1000
    assert kept[1] == given_back[1], "weights and moments after three steps"


IN_A_THREAD = """
import threading
from pipeline.process_group import keep_freed_memory
thread = threading.Thread(target=lambda: print(keep_freed_memory()))
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back what mallopt can have it keep")
def test_loop_in_a_thread_with_its_own_heap_is_reported():
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC}
    command = [sys.executable, "-c", IN_A_THREAD]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("training runs in a thread whose malloc returns large blocks to the kernel")
    assert all(f"start this process with {name}={value}" in done.stdout for name, value in MALLOC.items())


@pytest.mark.parametrize(
    ("mallopt", "expected"),
    [
        (lambda number, value: 1, ""),
        # As in glibc before 2.35, whose largest M_MMAP_THRESHOLD is half of a heap of 64 MB.
        (lambda number, value: int(number != -3 or value <= 2**25), ""),
        (lambda number, value: int(number != -4), "mallopt rejected M_MMAP_MAX: "),
        (lambda number, value: 0, "mallopt rejected M_TRIM_THRESHOLD and M_MMAP_MAX: "),
        (None, "this C library has no mallopt: "),
    ],
)
def test_malloc_that_does_not_keep_freed_memory_is_reported(monkeypatch, mallopt, expected):
    library = SimpleNamespace() if mallopt is None else SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(process_group.ctypes, "CDLL", lambda name: library)
    said = process_group.keep_freed_memory()
    assert said.startswith(expected)
    assert bool(said) == bool(expected)
