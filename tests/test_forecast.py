"""What a stage will take: hand-made calibrations with forecasts worked out by hand, and what cannot be forecast."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import models
from data.errors import ConfigError, DataError
from data.images.augment import AugmentConfig
from jobs.__main__ import main
from jobs.cluster_config import ClusterConfig
from jobs.context import Context
from jobs.planning import outlook
from jobs.recipe.campaign import load
from pipeline import artifacts
from pipeline.plan import forecast as forecasting
from pipeline.plan import kept_forecast
from pipeline.plan.calibration import (
    Calibration,
    Hardware,
    Storage,
    decode_key,
    read_calibration,
    write_calibration,
)
from pipeline.plan.engine_cost import EngineTime
from pipeline.plan.forecast import forecast_step, passes_of
from pipeline.plan.operations import Operation, Trace, Work, timed, trace_of
from pipeline.plan.price import Failures, best_save_every, bill
from pipeline.plan.rates import Curve, Rates
from pipeline.preflight import machine
from pipeline.preflight.machine import cores, processor
from pipeline.training_config import DataConfig, TrainConfig
from pipeline.versions import package_versions

MM = Operation("mm", "float32", 2_000_000, 120_000, (100, 100, 100, 1))
ADD = Operation("add", "float32", 0, 1_000_000, ())
MODEL = models.config_of("mu/8", 16, 10)
TENSORS = len(list(models.build("mu/8", 16, 10).parameters()))
ELEMENTS = models.parameters_of(MODEL)


def engine_time(world: int, tensors: int, elements: int, micro_s: float, step_s: float) -> EngineTime:
    """What ZeRO 2 in fp32 added, as long on the clock as of the processor."""
    return EngineTime(world, 2, "fp32", "adam", False, tensors, elements, micro_s, step_s, micro_s, step_s)


def made(**changes: object) -> Calibration:
    """Two cores, products of 4 ms, sums of 1 MB in 1 ms, an engine of 2 ms a step and 10 µs a tensor alone."""
    alone = [engine_time(1, t, e, 0.001, 0.002 + 1e-5 * t) for t, e in ((10, 1000), (50, 1000), (10, 5000))]
    pair = [engine_time(4, t, e, 0.003, 0.006 + 1e-5 * t) for t, e in ((10, 1000), (50, 1000), (10, 5000))]
    values = {
        "date": "2026-11-22 15:00",
        "driver": Hardware(processor(), cores(), "cpu"),
        "worker": Hardware("by hand", 2, "cpu"),
        "versions": package_versions(),
        "threads": 1,
        "gpus": 0,
        "backend": "processes",
        "nodes": 1,
        "workers_on_a_node": 4,
        "operations": {"fp32": [(MM, 0.004), (ADD, 0.001)]},
        "call_s": {"fp32": 1e-5},
        "together": {"fp32": [(2, 1.25)]},
        "engines": [*alone, *pair],
        "collectives": {2: {"all_reduce": [(64, 0.0005)]}, 4: {"all_reduce": [(64, 0.001)]}},
        "copy_bytes_per_s": 1e9,
        "storage": Storage("/here", 1e8, 2e8),
    }
    return Calibration(**{**values, **changes})  # type: ignore[arg-type]


def config(**changes: object) -> TrainConfig:
    """A stage of 4 micro-batches of 2 images on 4 workers, two each."""
    values = {"steps": 10, "batch_size": 16, "micro_batch": 2, "precision": "fp32", "zero": 2, "save_every": 5}
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose passes are a product and two sums forward, two products and a sum backward."""
    trace = Trace(forward_calls=10, backward_calls=20)
    trace.forward.update({MM: 1, ADD: 2})
    trace.backward.update({MM: 2, ADD: 1})
    monkeypatch.setattr(forecasting, "traced", lambda work: trace)


def step_of(cfg: TrainConfig, world: int, calibration: Calibration, **options: object) -> forecasting.StepForecast:
    passes = passes_of(cfg, MODEL, calibration)
    return forecast_step(cfg, MODEL, world, passes, calibration, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------ a step


def test_a_step_of_one_worker_is_its_operators_its_calls_and_its_engine(by_hand) -> None:
    step = step_of(config(), 1, made())
    # 8 micro-batches; forward 4 + 2 × 1 ms and 10 calls of 0.01 ms, backward 2 × 4 + 1 ms and 20 calls.
    assert step.compute_s == pytest.approx(8 * (0.0061 + 0.0092))
    # Seven micro-batches of 1 ms and one with the step: 2 ms and 0.01 ms a tensor.
    assert step.host_s == pytest.approx(7 * 0.001 + 0.002 + 1e-5 * TENSORS, rel=1e-6)
    assert (step.reduce_s, step.wait_s, step.evaluate_s) == (0, 0, 0)
    # Masters and two moments in fp32, and 4096 bytes of header, copied at 1 GB/s every fifth step.
    assert step.save_s == pytest.approx((12 * ELEMENTS + 4096) / 1e9 / 5)
    assert step.images_per_s == pytest.approx(16 / step.step_s)


def test_four_workers_of_two_cores_slow_each_other_down_and_take_turns(by_hand) -> None:
    step = step_of(config(), 4, made())
    # Two micro-batches each; at most two compute at once, 1.25 × as long, and four on two cores take turns.
    assert step.compute_s == pytest.approx(2 * 0.0153 * 1.25 * 2)
    alone = 0.001 + 0.002 + 1e-5 * TENSORS
    together = 0.003 + 0.006 + 1e-5 * TENSORS
    assert step.host_s == pytest.approx(2 * alone, rel=1e-6)
    assert step.reduce_s == pytest.approx(together - 2 * alone, rel=1e-6)
    assert step.cpu_s == pytest.approx(2 * 0.0153 * 1.25 + together, rel=1e-6)


def test_a_world_between_the_measured_ones_takes_their_links_as_its_sums_grow(by_hand) -> None:
    calibration = made(collectives={2: {"all_reduce": [(64, 0.001)]}, 4: {"all_reduce": [(64, 0.004)]}})
    step = step_of(config(), 2, calibration)
    assert not step.is_measured_world
    # A sum of two takes a quarter of one of four: so do what four workers add beyond one, 2 and 4 ms.
    together = 3 * (0.001 + 0.002 / 4) + (0.002 + 1e-5 * TENSORS + 0.004 / 4)
    assert step.host_s + step.reduce_s == pytest.approx(together, rel=1e-6)


def test_decoding_takes_the_cores_of_those_who_compute_and_evaluation_the_forward_pass(by_hand) -> None:
    cfg = config(evaluate_every=5, data=DataConfig(train="x", processes=1))
    step = step_of(cfg, 1, made(), judged_images=40, images_per_cpu_s=10.0)
    # 16 images of 0.1 CPU-seconds each beside a step, on one decoding process: 1.6 s, of which the step hides its own.
    assert step.wait_s == pytest.approx(1.6 - step.compute_s - step.host_s)
    # 20 micro-batches of two images, forward, every fifth step.
    assert step.evaluate_s == pytest.approx(20 * 0.0061 / 5)


def test_a_set_that_two_stages_augment_in_two_ways_has_a_rate_of_each() -> None:
    calm = DataConfig(train="x", augment=AugmentConfig())
    busy = DataConfig(train="x", augment=AugmentConfig(randaug_layers=2))
    rates = {decode_key("/x", 16, calm.augment): 900.0, decode_key("/x", 16, busy.augment): 400.0}
    calibration = made(decode=rates)
    gpu = dataclasses.replace(calm, decode="gpu")
    looked_up = {}
    for name, data in (("calm", calm), ("busy", busy), ("gpu", gpu)):
        looked_up[name] = outlook.decode_rate(lambda path: f"/{path}", config(data=data), MODEL, calibration)
    assert looked_up == {"calm": 900.0, "busy": 400.0, "gpu": None}


def test_a_gpu_hides_what_its_host_does_and_has_cores_for_decoding(by_hand) -> None:
    worker = Hardware("by hand", 2, "NVIDIA H100 80GB HBM3")
    cfg = config(data=DataConfig(train="x", processes=2))
    step = step_of(cfg, 1, made(gpus=1, worker=worker), images_per_cpu_s=100.0)
    assert step.host_s == 0, "the GPU is busy for longer than its host"
    assert step.wait_s == 0 and step.step_s == pytest.approx(step.compute_s + step.save_s)


# ------------------------------------------------------------------------ operators


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trace_holds_the_operators_of_the_real_step(precision: str) -> None:
    """Of a fake run the operators and their shapes are those of a real one; the products' FLOPs are torch's count."""
    work = Work(models.config_of("S/16", 32, 10, patch=8, depth=2), 3, precision, recomputed=1)
    trace = trace_of(work)
    timing = timed(work, torch.device("cpu"), 1, lambda: 0.0)
    seen = {operation: len(seconds) for operation, seconds in timing.seconds.items()}
    assert dict(trace.forward + trace.backward) == seen
    assert trace.forward_calls + trace.backward_calls == timing.calls

    model = models.build("S/16", 32, 10, patch=8, depth=2)
    images = torch.zeros(3, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        F.mse_loss(model(images), torch.zeros(3, 10)).backward()
    flops = {operation.name: 0 for operation in trace.forward + trace.backward if operation.name in ("mm", "addmm")}
    for operation, count in trace_of(dataclasses.replace(work, precision="fp32", recomputed=0)).backward.items():
        if operation.name == "mm":
            flops["mm"] += count * operation.flops
    counted = counter.get_flop_counts()["Global"]
    assert flops["mm"] == counted[torch.ops.aten.mm]


def test_times_between_measured_sizes_are_those_of_a_straight_line_in_logarithms() -> None:
    points = [(1_000, 0.001), (100_000, 0.1), (1_000, 0.003), (1_000, 0.001)]
    curve = Curve(points)
    assert curve.at(1_000) == 0.001  # the median of three
    assert curve.at(10_000) == pytest.approx(math.sqrt(0.001 * 0.1))
    assert curve.at(300_000) == pytest.approx(0.3)
    assert curve.at(10) == 0.001


def test_a_product_of_another_shape_has_the_rate_of_its_neighbours_and_an_unknown_operator_moves_its_bytes() -> None:
    rates = Rates([(MM, 0.004), (ADD, 0.001)])
    wider = Operation("addmm", "float32", 4_000_000, 200_000, (100, 200, 100, 1))
    assert rates.seconds_of(wider) == (pytest.approx(0.008), True)
    assert rates.seconds_of(Operation("erfinv", "float32", 0, 2_000_000, ())) == (pytest.approx(0.002), False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to trace for")
def test_a_step_on_gpus_is_not_traced_with_the_operators_of_a_cpu() -> None:
    with pytest.raises(ConfigError, match="torch has none here: plan where the workers run"):
        trace_of(Work(MODEL, 1, "bf16", device="cuda"))


# ------------------------------------------------------------------------ money and failures


def test_a_bill_is_hours_times_workers_times_the_price_and_failures_lengthen_it() -> None:
    # 7,200 steps of half a second are an hour.
    calm = bill(8, 7200, 0.5, save_every=100, failures=None, price=2.5)
    assert (calm.steps_s, calm.finish_s, calm.worker_hours, calm.cost) == (3600, 3600, 8, 20)
    # Two nodes that fail every 10 hours: one of them every 5. A failure costs 35 s and 50 steps, 60 s in all.
    failing = bill(8, 7200, 0.5, save_every=100, failures=Failures(10, 35, 2), price=2.5)
    assert failing.finish_s == pytest.approx(3600 / (1 - 60 / 18000))
    assert failing.failures == pytest.approx(failing.finish_s / 18000)
    assert failing.cost == pytest.approx(8 * 2.5 * failing.finish_s / 3600)
    # A save that is on the disk after 40 s: a failure costs that many more.
    slow = bill(8, 7200, 0.5, save_every=100, failures=Failures(10, 35, 2), price=2.5, durable_s=40)
    assert slow.finish_s == pytest.approx(3600 / (1 - 100 / 18000))
    # A stage of 60 steps that saves only at its end has no more than them to lose: 35 s and 30 steps of half a second.
    short = bill(8, 60, 0.5, save_every=10_000, failures=Failures(10, 35, 2), price=None)
    assert short.finish_s == pytest.approx(30 / (1 - 50 / 18000))
    assert bill(1, 8000, 1.0, save_every=7200, failures=Failures(1, 1), price=None).finish_s == math.inf


def test_young_says_how_often_to_save_and_the_disk_how_often_one_can() -> None:
    # √(2 · 2 s · 10,000 s) = 200 s, which are 400 steps of half a second.
    failures = Failures(10_000 / 3600)
    assert best_save_every(0.5, 2.0, 10.0, failures) == 400
    assert best_save_every(0.5, 2.0, 300.0, failures) == 600
    # The formula's minimum: a little more or less often costs more.
    lost = {n: 2.0 / (n * 0.5) + n * 0.5 / 2 / 10_000 for n in (350, 400, 450)}
    assert min(lost, key=lost.__getitem__) == 400


def test_any_node_that_fails_ends_the_attempt_so_that_more_nodes_fail_more_often() -> None:
    of_ray = outlook.Outlook(made(backend="ray", workers_on_a_node=4), mtbf_hours=100.0, restart_s=60.0)
    intervals_h = {}
    for world in (4, 5, 16):
        failures = of_ray.failures(world)
        assert failures is not None and failures.restart_s == 60.0
        intervals_h[world] = failures.interval_s / 3600
    assert intervals_h == {4: 100, 5: 50, 16: 25}
    # Plain processes are all on one node.
    of_processes = outlook.Outlook(made(), mtbf_hours=100.0).failures(16)
    assert of_processes is not None and of_processes.interval_s == 100 * 3600
    assert outlook.Outlook(made()).failures(4) is None


def test_another_number_of_steps_between_saves_is_proposed_where_the_stage_then_ends_sooner(by_hand) -> None:
    calibration = made(storage=None)
    looked = outlook.Outlook(calibration, mtbf_hours=10_000 / 3600, restart_s=100.0)
    alone = step_of(config(), 1, calibration)
    # A step of one second, a save that holds it up for two, a failure every 10,000 s: Young's 200 s.
    step = dataclasses.replace(alone, compute_s=1.0, host_s=0.0, snapshot_s=2.0, save_s=2.0 / 4000)
    text = outlook.save_text("pretrain", config(save_every=4000), MODEL, step, 10_000, looked)
    # Now 10,005 s, of a failure's cost 100 + 2,001 + 2 s: 12,669 s. Then 10,100 s and 100 + 101 + 2 s: 10,309 s.
    assert text.startswith("every 4,000 steps; every 200 would cost least, the stage then ends 19% sooner: ")
    assert text.endswith("a node of 1 fails every 3 h (Young 1974); type pretrain.save_every=200")
    # From 150 to 200 steps the stage gains 0.1 %.
    step = dataclasses.replace(step, save_s=2.0 / 150)
    text = outlook.save_text("pretrain", config(save_every=150), MODEL, step, 10_000, looked)
    assert text.startswith("every 150 steps; no other number ends 1% sooner: ") and "type" not in text
    # A stage of 100 steps has no use for 200.
    step = dataclasses.replace(step, save_s=2.0 / 10)
    text = outlook.save_text("pretrain", config(save_every=10), MODEL, step, 100, looked)
    assert text.startswith("every 10 steps; every 100 would cost least") and text.endswith("save_every=100")
    # A restart of 100 s and a failure every 90: it helps nothing to save more often.
    failing = dataclasses.replace(looked, mtbf_hours=90 / 3600)
    text = outlook.save_text("pretrain", config(save_every=150), MODEL, step, 10_000, failing)
    assert text.startswith("every 150 steps; no number of steps between two saves lets the stage end: ")
    assert "type" not in text


# ------------------------------------------------------------------------ what cannot be forecast


def test_a_forecast_is_refused_where_nothing_like_it_was_measured(by_hand) -> None:
    alone = [time for time in made().engines if time.world == 1]
    refusals = {
        "measured in fp32, the stage computes in bf16": (config(precision="bf16"), 1, made()),
        "ZeRO 3 with adam in fp32 was not measured": (config(zero=3), 1, made()),
        "ZeRO 2 with adam in fp32 in exact mode was not measured": (config(exact_parts=4), 4, made()),
        "only 1 worker: 4 cannot be forecast": (config(), 4, made(engines=alone, collectives={})),
    }
    for message, (cfg, world, calibration) in refusals.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            step_of(cfg, world, calibration)


def test_a_calibration_comes_back_as_it_was_written_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration = made(decode={"/data/train at 224 px": 900.0})
    write_calibration(path, calibration)
    assert read_calibration(path) == calibration

    text = path.read_text()
    path.write_text(text.replace("0.004", "0.003"))
    with pytest.raises(DataError, match="does not match its own sha256") as caught:
        read_calibration(path)
    assert f"type python -m jobs calibrate --output {path}" in str(caught.value) and "done.json" not in str(
        caught.value
    )
    path.write_text(text[:-20])
    with pytest.raises(DataError, match="torn or altered"):
        read_calibration(path)
    with pytest.raises(DataError, match=r"there is no calibration\n  type python -m jobs calibrate"):
        read_calibration(tmp_path / "none.json")
    artifacts.write_record(path, {"calibration": 99, "values": {}})
    with pytest.raises(DataError, match="schema 99, expected 3\n  type python -m jobs calibrate"):
        read_calibration(path)
    artifacts.write_record(path, {"calibration": 3, "values": {"driver": ["x", 1, "cpu"]}})
    with pytest.raises(DataError, match="holds no calibration: KeyError"):
        read_calibration(path)


def test_a_calibration_of_another_machine_is_not_gone_by_unless_it_is_named(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("PATCHLINE_CALIBRATION", str(path))
    assert "this machine is not calibrated; type python -m jobs calibrate" in outlook.outlook_of(None).problem
    write_calibration(path, made(driver=Hardware("Abacus", 64, "cpu")))
    refused = outlook.outlook_of(None)
    assert refused.calibration is None
    assert f"was made on Abacus with 64 cores, this is {processor()} with" in refused.problem
    assert f"--calibration {path}" in refused.problem
    assert outlook.outlook_of(str(path)).calibration is not None
    write_calibration(path, made(versions={**package_versions(), "torch": "2.0.1", "numpy": "1.0"}))
    assert f"was made with torch 2.0.1, this is {torch.__version__}; type python" in outlook.outlook_of(None).problem
    with pytest.raises(ConfigError, match="--price is -1, expected more than 0"):
        outlook.outlook_of(str(path), price=-1.0)


def test_a_calibration_of_another_gpu_is_not_gone_by(tmp_path: Path, monkeypatch) -> None:
    gpus = tmp_path / "gpus"
    monkeypatch.setattr(machine, "NVIDIA_GPUS", gpus)
    worker = Hardware(processor(), cores(), "NVIDIA H100 80GB HBM3")
    path = tmp_path / "calibration.json"
    calibration = made(gpus=1, worker=worker)
    # Where the driver tells nothing, torch says itself that it has no GPU to trace for.
    assert outlook.of_another_machine(calibration, path) == ""
    folder = gpus / "0000:0a:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n")
    assert outlook.of_another_machine(calibration, path) == ""
    (folder / "information").write_text("Model: \t\t NVIDIA A100-SXM4-80GB\n")
    assert "this machine has NVIDIA A100-SXM4-80GB; type" in outlook.of_another_machine(calibration, path)
    # Workers of Ray may be on other machines than the command.
    assert outlook.of_another_machine(made(gpus=1, worker=worker, backend="ray"), path) == ""


def test_workers_unlike_those_that_were_measured_are_not_forecast() -> None:
    here = ClusterConfig(backend="processes")
    assert outlook.of_other_workers(made(), here) == ""
    refusals = {
        "for workers that compute on the CPU with 1 thread, here they do on a GPU; type": {"gpus_per_worker": 1},
        "the CPU with 1 thread, here they do on the CPU with 4 threads; type": {"cpus_per_worker": 4},
    }
    for message, change in refusals.items():
        assert message in outlook.of_other_workers(made(), dataclasses.replace(here, **change))
    # On GPUs the threads of a worker compute little.
    gpu = ClusterConfig(gpus_per_worker=1, cpus_per_worker=8)
    assert outlook.of_other_workers(made(gpus=1), gpu) == ""


# ------------------------------------------------------------------------ plan, run, status


def test_plan_says_time_and_money_once_calibrated_and_what_to_type_before(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    assert main(["plan", str(recipe)]) == 0
    assert capsys.readouterr().out.count("  time    not forecast: this machine is not calibrated; type python") == 2

    path = tmp_path / "calibration.json"
    write_calibration(path, made())
    words = ["--calibration", str(path), "--price", "2.5", "--mtbf-hours", "100"]
    assert main(["plan", str(recipe), *words]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"  time    [\d.]+ m?s a step on 2 workers: compute \S+ m?s, host \S+ m?s, reduce \S+ m?s, save", out
    )
    assert re.search(r"  finish  \S+ for 24 steps; with 0.0 failures \S+; 0.0 worker-hours, 0.0\d at 2.5 each", out)
    assert re.search(
        r"  save    every 8 steps; no other number ends 1% sooner: .* every 100 h \(Young 1974\)$",
        out,
        re.MULTILINE,
    )
    assert re.search(r"  worlds  least bill on 1 worker, .*; 4: \S+, 0.0\d$", out, re.MULTILINE)
    assert "with backend" not in out
    assert main(["plan", str(recipe), *words, "cluster.backend=ray"]) == 0
    assert "; measured with backend processes, not ray;" in capsys.readouterr().out
    assert main(["plan", str(recipe), *words, "cluster.gpus_per_worker=1"]) == 0
    assert capsys.readouterr().out.count("calibrated for workers that compute on the CPU with 1 thread, here") == 2
    # The second stage has ZeRO 0 and SGD, which nobody measured.
    assert "  time    not forecast: ZeRO 0 with sgd in fp32 was not measured; type python -m jobs calibrate" in out


def test_what_happened_stands_beside_what_was_forecast(tmp_path: Path) -> None:
    assert kept_forecast.beside_measured(tmp_path) == ""
    step = {"training_s": 0.040, "wait_s": 0.0, "save_s": 0.001}
    kept_forecast.write_forecast(tmp_path, "today, here", {2: step})
    records = []
    # Ten steps each; the first report holds what starts slowly, two an evaluation of one second.
    for seconds, evaluated_s in ((3.0, 0.0), (1.44, 1.0), (1.45, 1.0), (0.43, 0.0)):
        record = {"kind": "train", "attempt": 1, "world": 2, "losses": [0.0] * 10, "wait": 0.05, "seconds": seconds}
        records.append({**record, "evaluated_s": evaluated_s, "stalled_s": 0.0, "loss": 0.0})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert kept_forecast.beside_measured(tmp_path) == (
        "forecast 40 ms a step on 2 workers, measured 44 ms (1.10 ×, median of 3 reports; waiting for data "
        "forecast 0.00 ms, measured 7.20 ms)"
    )
    assert kept_forecast.short_text(tmp_path, records[-1]) == "forecast 40 ms a step, now 43 ms"
    assert kept_forecast.short_text(tmp_path, {**records[-1], "world": 8}) == ""
    # Long steps in seconds, with a digit behind the point.
    kept_forecast.write_forecast(tmp_path, "today, here", {2: {**step, "training_s": 51.93}})
    slow = {**records[-1], "seconds": 584.3}
    assert kept_forecast.short_text(tmp_path, slow) == "forecast 51.9 s a step, now 58.4 s"


def context_of(recipe: Path, run: Path, said: list[str]) -> Context:
    """What the recipe's first stage is told of a run."""
    loaded = load(recipe, [])
    stage = loaded.stage("pretrain")
    return Context(
        name=stage.name,
        run=run,
        directory=run / "pretrain",
        key=stage.key,
        cluster=loaded.cluster,
        resolve=loaded.resolve,
        model=stage.model,
        say=said.append,
        tick=lambda *_: None,
        stopping=lambda: False,
    )


@pytest.mark.parametrize("failing", ["decode_rate", "passes_of", "write_forecast"])
def test_a_forecast_that_cannot_be_kept_is_one_line_of_the_run(failing, recipe, tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("PATCHLINE_CALIBRATION", str(path))
    write_calibration(path, made())
    monkeypatch.setattr(outlook, "passes_of", lambda *_: forecasting.Passes(0.001, 0.002, 0.0))
    stage = load(recipe, []).stage("pretrain")
    said: list[str] = []
    context = context_of(recipe, tmp_path, said)
    outlook._keep_forecast(stage.config, context)
    assert said == [] and kept_forecast.read_forecast(context.directory).keys() == {2}

    def fail(*_: object, **__: object) -> None:
        raise OSError("no room\nhere")

    monkeypatch.setattr(outlook, failing, fail)
    outlook._keep_forecast(stage.config, context)
    assert said == ["pretrain: no forecast is kept beside its steps: OSError: no room"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"driver": Hardware("Abacus", 64, "cpu")}, "was made on Abacus with 64 cores, this is"),
        ({"threads": 4}, "calibrated for workers that compute on the CPU with 4 threads, here they do"),
    ],
)
def test_a_run_says_why_it_does_not_go_by_the_calibration_that_is_there(changes, reason, recipe, tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("PATCHLINE_CALIBRATION", str(path))
    write_calibration(path, made(**changes))
    said: list[str] = []
    context = context_of(recipe, tmp_path, said)
    outlook._keep_forecast(load(recipe, []).stage("pretrain").config, context)
    (line,) = said
    assert line.startswith("pretrain: not forecast: ") and reason in line and "type python -m jobs calibrate" in line
    assert kept_forecast.read_forecast(context.directory) == {}


@pytest.mark.slow
def test_a_machine_is_calibrated_and_a_run_keeps_its_forecast(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("jobs.planning.calibrate.LADDER", (("Ti/16", 1),))
    overrides = ["finetune.zero=2"]
    assert main(["calibrate", str(recipe), *overrides]) == 0
    out = capsys.readouterr().out
    file = tmp_path / "cache" / "patchline" / "calibration.json"
    assert "products" in out and "ZeRO 2" in out and "all-reduce" in out and "images a CPU-second" in out
    assert f"wrote      {file}" in out
    calibration = read_calibration(file)
    assert {time.world for time in calibration.engines} == {1, 2}
    assert all(seconds > 0 for _, seconds in calibration.operations["fp32"])

    assert main(["plan", str(recipe), *overrides]) == 0
    assert "s a step on 2 workers" in capsys.readouterr().out
    assert main(["run", str(recipe), *overrides]) == 0
    assert re.search(
        r"pretrain: forecast [\d.]+ ms a step on 2 workers, measured [\d.]+ ms \(", capsys.readouterr().out
    )
