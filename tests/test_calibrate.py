"""How a calibration is made: hand-made reports of workers put together, and what is measured where time is short."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from data.errors import ConfigError
from jobs.cluster_config import ClusterConfig
from jobs.planning import calibrate as calibrating
from jobs.planning.passing import folder_in
from jobs.planning.slowest_node import put_together
from models import Size
from pipeline.plan import measure as measuring
from pipeline.plan import operations
from pipeline.plan.calibration import read_calibration
from pipeline.plan.engine_cost import EngineKind, carried_over
from pipeline.plan.operations import Operation, Work

MM = ["mm", "float32", 2_000_000, 120_000, [100, 100, 100, 1]]
ADD = ["add", "float32", 0, 1_000_000, []]


def worker(node: str, mm_s: float, **changes: Any) -> dict[str, Any]:
    """What a worker has found out that took `mm_s` for a product."""
    compute = {"fp32": {"operations": [[*MM, mm_s], [*ADD, 0.001]], "call_s": 2e-5, "passes_s": 0.5}}
    report = {
        "node": node,
        "hardware": [f"processor of {node}", 2, "cpu"],
        "threads": 1,
        "compute": compute,
        "alone": {},
        "at_once": 2,
        "copy_bytes_per_s": 2e9,
        "engines": [],
        "collectives": {"2": {"all_reduce": [[64.0, 0.001]], "all_gather": []}},
        "probes": [1.0, 1.0, 1.0, 1.0],
    }
    return {**report, **changes}


def test_of_several_nodes_the_slowest_counts_and_company_is_taken_out_of_its_times() -> None:
    alone = {"fp32": {"passes_s": 0.4}}
    workers = [
        worker("fast", 0.001, storage=[3e8, 9e8]),
        worker("fast", 0.001),
        # Half a second where two computed, 0.4 s alone: 1.25 × as long.
        worker("slow", 0.004, alone=alone, storage=[1e8, 8e8], copy_bytes_per_s=1e9),
        worker("slow", 0.006),
    ]
    made = put_together({4: {"workers": workers}}, ClusterConfig(backend="processes"), 0.5, "/here")
    assert made.worker.processor == "processor of slow"
    (mm, mm_s), (add, add_s) = made.operations["fp32"]
    assert mm == Operation("mm", "float32", 2_000_000, 120_000, (100, 100, 100, 1)) and add.name == "add"
    # The median of 4 and 6 ms, over 1.25.
    assert (mm_s, add_s) == (pytest.approx(0.005 / 1.25), pytest.approx(0.001 / 1.25))
    assert made.call_s["fp32"] == pytest.approx(2e-5 / 1.25)
    assert made.slowdown("fp32", 2) == pytest.approx(1.25) and made.slowdown("fp32", 1) == 1
    assert made.collectives == {2: {"all_reduce": [(64, 0.001)]}}, "what the backend cannot do is not there"
    assert (made.nodes, made.workers_on_a_node, made.copy_bytes_per_s) == (2, 2, 1e9)
    assert made.storage == ("/here", 1e8, 8e8)


def test_an_engine_is_carried_over_by_tensors_and_along_the_measured_elements() -> None:
    # 2 ms whatever the model is and 0.1 ms a tensor; 1 ns an element up to 10 million, above them 3 ns.
    measured = [
        (Size(20, 0), 0.004),
        (Size(150, 0), 0.017),
        (Size(50, 10_000_000), 0.002 + 0.005 + 0.010),
        (Size(40, 20_000_000), 0.002 + 0.004 + 0.040),
    ]
    fixed_s = 0.002 + 0.0001 * 100
    assert carried_over(measured, Size(100, 5_000_000)) == pytest.approx(fixed_s + 0.005)
    assert carried_over(measured, Size(100, 15_000_000)) == pytest.approx(fixed_s + 0.025)
    # Beyond the largest in proportion to it: twice its 40 ms.
    assert carried_over(measured, Size(100, 40_000_000)) == pytest.approx(fixed_s + 0.080)
    # A model of more tensors that took less is noise: a tensor costs nothing then.
    assert carried_over([(Size(20, 0), 0.004), (Size(150, 0), 0.003)], Size(100, 0)) == pytest.approx(0.004)


def test_without_a_recipe_what_most_people_have_is_measured_first_and_what_is_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: dict[int, Mapping[str, Any]] = {}

    def run_workers(_campaigns: object, cluster: ClusterConfig, task: Mapping[str, Any], _say: object) -> Any:
        tasks[cluster.workers] = task
        # Of two workers there is time for three kinds of engines.
        engines = []
        for asked in task["engines"][:3]:
            times = {"tensors": 20, "elements": 0, "micro_s": 0.1, "step_s": 0.1, "micro_cpu_s": 0.1, "step_cpu_s": 0.1}
            engines.append({**asked, "world": cluster.workers, **times})
        return {"workers": [worker("here", 0.001, engines=engines, at_once=1)]}

    monkeypatch.setattr(calibrating, "run_workers", run_workers)
    monkeypatch.setattr(calibrating, "cores", lambda: 2)
    monkeypatch.setattr(calibrating, "gpus_present", lambda: 0)
    said: list[str] = []
    calibrating.calibrate([], tmp_path / "calibration.json", said.append)
    assert list(tasks) == [2, 1], "what the largest group had no time for, the others are not asked for"
    assert [(asked["zero"], asked["precision"]) for asked in tasks[1]["engines"]] == [
        (2, "bf16"),
        (2, "fp32"),
        (1, "bf16"),
    ]
    assert tasks[2]["engines_s"] > 0 and tasks[1]["engines_s"] is None
    assert tasks[2]["works"] and not tasks[1]["works"]
    assert any(line.startswith("left out   ZeRO 0 in fp32, ZeRO 1 in fp32, ZeRO 3 in bf16, ZeRO 3 in") for line in said)
    calibration = read_calibration(tmp_path / "calibration.json")
    assert {time.kind for time in calibration.engines if time.world == 1} == {
        EngineKind(2, "bf16", "adam"),
        EngineKind(2, "fp32", "adam"),
        EngineKind(1, "bf16", "adam"),
    }


def test_what_the_engine_adds_is_a_step_of_one_micro_batch_and_what_each_further_one_takes_more(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "ENGINE_MODELS", ((64, 1, 4),))
    monkeypatch.setattr(measuring.dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(measuring.dist, "get_world_size", lambda: 1)
    # (seconds, processor seconds) of steps of one and of two micro-batches; their passes take 0.2 and 0.1 each.
    steps = {1: (1.0, 0.9), 2: (1.6, 1.3)}
    monkeypatch.setattr(measuring, "step_times", lambda _asked, _work, accumulation, *_: steps[accumulation])
    asked = calibrating.engine(2, "bf16", "adam", False)
    (measured,) = measuring.engine_times(asked, [(0.2, 0.1)], torch.device("cpu"))
    assert (measured["step_s"], measured["step_cpu_s"]) == (pytest.approx(0.8), pytest.approx(0.8))
    assert (measured["micro_s"], measured["micro_cpu_s"]) == (pytest.approx(0.4), pytest.approx(0.3))
    assert (measured["world"], measured["zero"], measured["tensors"]) == (1, 2, 20)


def test_a_worker_that_waits_for_a_slower_one_does_not_count_that_as_the_engines(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "ENGINE_MODELS", ((64, 1, 4),))
    monkeypatch.setattr(measuring.dist, "get_world_size", lambda: 2)
    # This worker's passes take 0.2 s and the other's 0.5 s; for a step's end both wait.
    of_the_other = torch.tensor([[1.0, 0.9], [1.8, 1.7], [0.5, 0.5]])

    def all_reduce(times_s: torch.Tensor, _op: object) -> None:
        times_s.copy_(torch.maximum(times_s, of_the_other))

    monkeypatch.setattr(measuring.dist, "all_reduce", all_reduce)
    steps = {1: (1.0, 0.6), 2: (1.8, 1.1)}
    monkeypatch.setattr(measuring, "step_times", lambda _asked, _work, accumulation, *_: steps[accumulation])
    asked = calibrating.engine(2, "bf16", "adam", False)
    (measured,) = measuring.engine_times(asked, [(0.2, 0.2)], torch.device("cpu"))
    assert (measured["step_s"], measured["micro_s"]) == (pytest.approx(0.5), pytest.approx(0.3))
    assert (measured["step_cpu_s"], measured["micro_cpu_s"]) == (pytest.approx(0.4), pytest.approx(0.3))


def test_a_first_pass_that_takes_long_does_not_decide_how_often_its_operators_are_timed(monkeypatch) -> None:
    now = [0.0]
    took = iter((9.0, 0.1, 0.1, 0.1, 0.1, 9.0, 0.4, 0.4, 0.4))

    def loss_of(*_: object) -> torch.Tensor:
        now[0] += next(took)
        return torch.ones(1, requires_grad=True)

    monkeypatch.setattr(operations, "loss_of", loss_of)
    work = Work(models.config_of("mu/8", 16, 10), 1, "fp32")
    device = torch.device("cpu")
    # A long first pass, then two rounds of 0.1 s, each with and without an onlooker.
    timing = operations.timed(work, device, 2, lambda: now[0], plainly=True, long_s=0.3)
    assert timing.rounds == 2 and timing.without_onlooker_s == pytest.approx([0.1, 0.1])
    # Of long ones only the onlooker's first, but as many as asked without it.
    timing = operations.timed(work, device, 2, lambda: now[0], plainly=True, long_s=0.3)
    assert timing.rounds == 1 and timing.without_onlooker_s == pytest.approx([0.4, 0.4])


def test_what_is_timed_has_finite_weights_whatever_lay_in_its_memory(monkeypatch) -> None:
    # Torch then fills what it hands out with NaN.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        for precision in ("fp32", "bf16"):
            work = Work(measuring.engine_model(64, 1), 1, precision)
            model = operations.built(work, torch.device("cpu"))
            loss = operations.loss_of(work, model, *operations.inputs(work, torch.device("cpu")))
            loss.backward()
            for name, parameter in model.named_parameters():
                assert parameter.isfinite().all() and parameter.grad.isfinite().all(), name
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_engine_that_skips_its_steps_is_not_timed(monkeypatch) -> None:
    class Skipping(torch.nn.Module):
        """Takes two of three steps."""

        updates = 2

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(images), 10)

        def backward(self, loss: torch.Tensor) -> None:
            pass

        def end_micro_batch(self, rate: float) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(measuring, "engine_of", lambda *_: Skipping())
    monkeypatch.setattr(measuring, "clocked", lambda run, _device: (run(), (1.0, 1.0))[1])
    asked = calibrating.engine(2, "bf16", "adam", False)
    work = Work(measuring.engine_model(64, 1), 1, "bf16")
    with pytest.raises(RuntimeError, match="3 steps of ZeRO 2 in bf16 were timed, and only 2 were taken"):
        measuring.step_times(asked, work, 1, 3, torch.device("cpu"))


def test_the_two_smallest_models_under_the_engine_tell_what_a_tensor_costs() -> None:
    sizes = sorted(models.size_of(measuring.engine_model(width, depth)) for width, depth, _ in measuring.ENGINE_MODELS)
    by_elements = sorted(sizes, key=lambda size: size.elements)
    few, many = by_elements[:2]
    assert many.tensors > 5 * few.tensors and many.elements < by_elements[2].elements / 5
    with pytest.raises(ConfigError, match="measured on one model only"):
        carried_over([(few, 0.1)], many)


def test_what_warms_a_new_process_up_is_not_taken_for_noise() -> None:
    calls = [0]

    def clock() -> float:
        # Two calls a product: the first ten products take twice as long as the others.
        calls[0] += 1
        products, is_end = divmod(calls[0] - 1, 2)
        return products * 10.0 + is_end * (2.0 if products < 10 else 1.0)

    assert measuring.probe(clock, torch.device("cpu")) == [1.0] * 5


def test_a_calibration_that_is_told_to_end_leaves_no_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="ended by SIGTERM"), folder_in(run) as folder:
        assert folder.parent == run
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert not run.exists() and signal.getsignal(signal.SIGTERM) == before


def test_no_engine_is_begun_after_the_time_for_them_but_the_first(monkeypatch) -> None:
    seconds = iter((0.0, 10.0, 11.0, 13.5))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(measuring.dist, "broadcast", lambda *_: None)
    monkeypatch.setattr(measuring, "passes_without_engine", lambda *_: [])
    monkeypatch.setattr(measuring, "engine_times", lambda asked, *_: [asked])
    engines = [{"precision": "fp32", "zero": zero} for zero in (0, 1, 2, 3)]
    # They begin after 10, 11 and 13.5 seconds, of which 12 are given.
    assert measuring.all_engine_times(engines, 12.0, torch.device("cpu")) == engines[:2]
