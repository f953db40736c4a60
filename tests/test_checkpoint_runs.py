"""Whole runs under faults: whatever is killed, and whenever, the run ends bit for bit like an uninterrupted one."""

import json
import math
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import models
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.index.document import load_index
from data.order import Ledger, Order
from jobs.__main__ import main
from pipeline import health
from pipeline.artifacts import write_record
from pipeline.checkpoints import reader as checkpoint_reader
from pipeline.checkpoints.manifest import committed, read_manifest
from pipeline.monitoring.telemetry import read_metrics
from tests.support import run_faults
from tests.support.demo import step_losses
from tests.support.drives import (
    assert_same,
    assert_same_stage,
    at_step,
    evaluations,
    finish,
    forget,
    incidents,
    output_of,
    phase_of,
    reports,
    stage,
    start,
    stop_at,
    worker_log,
    worker_pid,
)

SEED = int(os.environ.get("FAULT_SEED", "20261120"))
SOAK = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def twin(tmp_path_factory) -> Path:
    """Return the undisturbed run."""
    run = tmp_path_factory.mktemp("twin") / "run"
    assert finish(run) == 0, output_of(run)
    return run


@pytest.fixture
def run(twin, tmp_path) -> Path:
    """Return a run with packed shards, before training."""
    shutil.copytree(twin, tmp_path / "run", ignore=shutil.ignore_patterns("pretrain-*", "attempts", "status.json"))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """Return sixty test digits in three shards, which two workers evaluate in eight batches each; read-only."""
    folder = tmp_path_factory.mktemp("few")
    pack(islice(digits(train=False, image_size=16), 60), folder, name="few", shard_samples=20)
    return folder


@pytest.fixture(scope="module")
def evaluated(few) -> list[str]:
    """Return options that evaluate steps 8, 16, 24, 32 and 40, all of which are committed."""
    return ["pretrain.evaluate_every=8", f"pretrain.data.evaluate={few}", "pretrain.save_every=4"]


@pytest.fixture(scope="module")
def evaluated_twin(tmp_path_factory, evaluated) -> Path:
    """Return an undisturbed run with evaluations."""
    run = tmp_path_factory.mktemp("evaluated") / "run"
    assert finish(run, *evaluated) == 0, output_of(run)
    assert {step: len(values) for step, values in evaluations(stage(run)).items()} == dict.fromkeys(range(8, 41, 8), 1)
    return run


def training_set(run: Path) -> Path:
    return next(run.glob("shards-*")) / "train"


@pytest.mark.parametrize("rounds", [1, pytest.param(17, marks=SOAK)])
def test_workers_killed_at_any_moment_change_nothing(rounds, evaluated, evaluated_twin, run) -> None:
    """Three kills per round, at random moments of random phases."""
    rng = random.Random(SEED)
    for number in range(rounds):
        forget(run)
        process = start(run, "pretrain.log_every=1", *evaluated, patch="slowly")
        for third in range(3):
            pause = rng.random() * 0.06

            def kill(pause: float = pause) -> None:
                time.sleep(pause)
                os.kill(worker_pid(run, rng.randrange(2)), signal.SIGKILL)

            at_step(run, process, 12 * third + rng.randrange(1, 10), kill)
        process.join()
        assert process.exitcode == 0, f"round {number}, FAULT_SEED={SEED}\n{output_of(run)}"
        assert_same(run, evaluated_twin)
        assert output_of(run).count("killed by SIGKILL; restarting from") == 3 * (number + 1), output_of(run)


@pytest.mark.parametrize(("rounds", "kills"), [(1, 2), pytest.param(17, 3, marks=SOAK)])
def test_workers_end_with_a_driver_killed_at_any_moment_and_the_next_driver_resumes(
    rounds, kills, evaluated, evaluated_twin, run
) -> None:
    """Several kills per round; workers and their decoding processes end with the driver."""
    rng, family = random.Random(SEED + 1), []
    for number in range(rounds):
        forget(run)
        for third in range(kills):
            process = start(run, "pretrain.log_every=1", *evaluated, "pretrain.data.processes=1", patch="slowly")

            def kill(process: Any = process) -> None:
                family[:] = psutil.Process(process.pid).children(recursive=True)
                process.kill()

            at_step(run, process, 12 * third + rng.randrange(1, 10), kill)
            process.join()
            assert process.exitcode == -signal.SIGKILL
            assert len(family) >= 4, "they outlive their driver"
            assert not psutil.wait_procs(family, timeout=20)[1], "they outlive their driver"
        assert finish(run, "pretrain.log_every=1", *evaluated) == 0, (
            f"round {number}, FAULT_SEED={SEED}\n{output_of(run)}"
        )
        assert_same(run, evaluated_twin)


@pytest.mark.parametrize("evaluate_on", ["training", pytest.param("spare", marks=pytest.mark.slow)])
def test_an_evaluation_interrupted_by_a_driver_kill_is_repeated_by_the_next_attempt(
    evaluate_on, evaluated, evaluated_twin, run
) -> None:
    """The driver is killed after the commit of step 8, when all workers, with no spare, are about to evaluate it."""
    options = [*evaluated, f"pretrain.evaluate_on={evaluate_on}", "cluster.cpus_per_worker=1"]
    assert finish(run, *options, patch="driver_killed_before_the_evaluation_of 8") == -signal.SIGKILL
    assert not evaluations(stage(run))
    assert read_manifest(committed(stage(run) / "checkpoints")[0]).step == 8
    assert finish(run, *options) == 0, output_of(run)
    assert "resumed from step 8" in output_of(run)
    assert_same(run, evaluated_twin)


COMPILED = [("zero=0",), ("zero=1", "precision=bf16"), ("zero=2", "polyak=0.9"), ("zero=3", "checkpoint_blocks=1")]
COMPILED += [(f"zero={zero}", "exact_parts=4") for zero in range(4)]
COMPILED += [("zero=3", "exact_parts=2", "precision=bf16")]


@pytest.mark.parametrize(
    ("options", "patch"),
    [
        pytest.param(("zero=3", "checkpoint_blocks=1"), "without_kernels", marks=pytest.mark.slow),
        *(pytest.param(options, "", marks=pytest.mark.slow) for options in COMPILED),
    ],
)
def test_a_compiled_run_resumes_bit_for_bit(options, patch, evaluated, run) -> None:
    """With dropout and accumulation; the resuming attempt evaluates, and compiles the evaluation, before it trains."""
    settings = [*evaluated, "pretrain.compile=true", "pretrain.model.dropout=0.1", "pretrain.steps=24"]
    settings += [f"pretrain.{option}" for option in options]
    undisturbed = run.parent / "undisturbed" / "run"
    shutil.copytree(run, undisturbed)
    assert finish(undisturbed, *settings, patch=patch or None) == 0, output_of(undisturbed)
    killed = f"{patch} driver_killed_before_the_evaluation_of 16".strip()
    assert finish(run, *settings, patch=killed) == -signal.SIGKILL
    assert finish(run, *settings, patch=patch or None) == 0, output_of(run)
    assert_same_stage(stage(run), stage(undisturbed))


STOPS = [[signal.SIGTERM], [signal.SIGTERM] * 2, [signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGHUP]]


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=SOAK)])
def test_a_signal_at_any_moment_commits_and_exits_75_and_a_second_ctrl_c_ends_at_once(
    rounds, evaluated, evaluated_twin, run
) -> None:
    """Five stops per round; before each start the clock jumps forward or back by an hour."""
    rng, clock = random.Random(SEED + 2), 0
    for number in range(rounds):
        forget(run)
        for fifth, signals in enumerate(STOPS):
            clock += rng.choice((-3600, 3600))
            process = start(run, "pretrain.log_every=1", *evaluated, patch=f"slowly {clock}")
            step, heard = 7 * fifth + rng.randrange(1, 4), output_of(run).count("finishing the step")

            def stop(process: Any = process, signals: Any = signals, heard: int = heard) -> None:
                os.kill(process.pid, signals[0])
                while signals[1:] and output_of(run).count("finishing the step") == heard:
                    time.sleep(0.001)
                for again in signals[1:]:
                    os.kill(process.pid, again)

            at_step(run, process, step, stop)
            process.join()
            context = f"{signals} after step {step}, FAULT_SEED={SEED}\n{output_of(run)}"
            newest = committed(stage(run) / "checkpoints")
            if signals == [signal.SIGINT] * 2:
                assert process.exitcode == 130, context
                assert "stopped without a commit" in output_of(run), context
                assert checkpoint_reader.verify(newest[0]).step >= 1
            else:
                stopped = read_manifest(newest[0]).step
                assert process.exitcode == 75, context
                assert stopped >= step, context
                assert f"stopped at step {stopped} after committing it" in output_of(run), context
                log = (stage(run) / "log.txt").read_text()
                assert f"[driver] {signals[0].name}: finishing the step" in log, log
        assert not list(stage(run).glob("stop*"))
        assert finish(run, *evaluated) == 0, f"round {number}, FAULT_SEED={SEED}\n{output_of(run)}"
        assert_same(run, evaluated_twin)


def test_a_stuck_terminal_delays_no_stop_and_the_log_has_every_line(run) -> None:
    """stdout and stderr are a full pipe without a reader, as with `less`, Ctrl-S or a stuck log collector."""
    assert stop_at(run, 7, "pretrain.log_every=1", patch="unread_terminal") == 75
    lines = (run / "log.txt").read_text().splitlines()
    stopped = read_manifest(committed(stage(run) / "checkpoints")[0]).step
    assert stopped >= 7
    assert any("SIGTERM: finishing the step" in line for line in lines)
    assert any(f"stopped at step {stopped} after committing it" in line for line in lines)
    for line in (stage(run) / "log.txt").read_text().splitlines():
        if not line.startswith("[driver] "):
            assert f"[{stage(run).name}] {line}" in lines
    shown = [line for line in lines if "lines are not shown" in line]
    assert len(shown) == 1, "a line a step, at least"
    assert int(shown[0].split()[0]) >= stopped, "a line a step, at least"


HANGS = {
    "reduce": r"worker 1 on .*, in reduce of step 12: frozen: stopped by a signal, no progress for \ds",
    "build": r"worker 1 on .*, in build: stuck for \ds; the other workers are waiting for it",
    "restore": r"worker 0 on .*, in restore: stuck for \ds; the other workers are waiting for it",
    "data": r"worker 1 on .*, in data of step 23, shard train-0000\d\d.tar: stalled reader: no batch for \ds",
    "collective": r"worker 0 on .*, in reduce of step 32: stuck collective: all 2 workers have been in it for \ds",
    "evaluate": r"worker 1 on .*, in evaluate after step 40, shard few-0000\d\d.tar: stuck for \ds, the others .*",
    "finish": r"worker 0 on .*, in finish after step 40: stuck for \ds; the other workers are waiting for it",
}


@pytest.mark.parametrize("places", [("reduce",), pytest.param(tuple(HANGS), marks=SOAK)])
def test_hung_run_is_ended_with_its_cause_and_resumes(places, few, twin, run) -> None:
    patch = f"hanging {','.join(places)}"
    assert finish(run, "pretrain.stall_s=5", f"pretrain.data.evaluate={few}", patch=patch) == 0, output_of(run)
    for place, found in zip(places, incidents(stage(run)), strict=True):
        assert re.fullmatch(HANGS[place], found), output_of(run)
    stacks = (stage(run) / "incidents.txt").read_text()
    assert stacks.count("Timeout (0:00:0") >= len(places) - 1, "who is stopped writes nothing, the others do"
    if "data" in places:
        assert "in micro_batches" in stacks
    assert_same(run, twin)


@pytest.mark.slow
def test_incident_names_the_worker_out_of_memory_and_a_remedy(twin, run) -> None:
    assert finish(run, patch="short_of_memory") == 0, output_of(run)
    expected = [
        "worker 1 on .*, in reduce of step 12: killed by the out-of-memory killer",
        "worker 0 on .*, in reduce of step 17: RuntimeError: .*DefaultCPUAllocator: can't allocate memory.*",
        "worker 1 on .*, in reduce of step 22: MemoryError",
        "worker 1 on .*, in reduce of step 27: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    ]
    found, hint = incidents(stage(run)), "; to use less memory, decrease .*"
    assert len(found) == 4, found
    assert all(re.fullmatch(e + hint, f) for e, f in zip(expected, found, strict=True)), found
    assert_same(run, twin)


FEWSHOT = """
cluster: {{workers: 2, backend: processes, backoff_s: 0.1}}
fewshot: {{init: {weights}, probe: {{train: {shards}, test: {test}, shots: [1]}}, micro_batch: 32, stall_s: 4}}
"""


def few_shot(run: Path, train: Path, shards: Path) -> str:
    """Write the recipe of a few-shot stage on a run's weights."""
    return FEWSHOT.format(weights=stage(run), shards=train, test=shards / "test")


def test_few_shot_is_restarted_watched_and_stopped_like_the_others(twin, shards, tmp_path) -> None:
    run, recipe = tmp_path / "run", few_shot(twin, training_set(twin), shards)
    process = start(run, patch="troubled_probe", recipe=recipe)
    while process.is_alive() and not phase_of(run, 1, attempt=3):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 75, output_of(run)
    (folder,) = run.glob("fewshot-*")
    killed, hung = incidents(folder)
    assert re.fullmatch(r"worker 1 on .*, in evaluate, shard train-000007.tar: killed by SIGKILL", killed)
    assert re.fullmatch(
        r"worker 1 on .*, in evaluate, shard train-000007.tar: stuck for \ds; the other workers are waiting.*", hung
    )
    assert finish(run, patch="troubled_probe", recipe=recipe) == 0, output_of(run)
    assert (folder / "metrics.json").exists()


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=SOAK)])
def test_all_ranks_agree_on_the_commit_if_a_rank_is_killed_or_slow_during_a_save(rounds, twin, run) -> None:
    """Five saves per round."""
    for number in range(rounds):
        forget(run)
        seed, before = SEED + 4 + number, output_of(run).count("killed by SIGKILL")
        assert finish(run, patch=f"suffering_in_saves {seed}") == 0, f"FAULT_SEED={SEED}\n{output_of(run)}"
        kills = sum(how != "slow" for _, how in run_faults.fates(seed).values())
        assert output_of(run).count("killed by SIGKILL; restarting from") - before == kills, (
            f"FAULT_SEED={SEED}\n{output_of(run)}"
        )
        assert_same(run, twin)


def test_failed_saves_are_logged_and_training_continues(twin, run) -> None:
    assert finish(run, "pretrain.max_failed_saves=4", patch="full_disk_for_a_while") == 0, output_of(run)
    text = output_of(run)
    for step, file, count in ((10, "rank-00001", 1), (15, "rank-00001", 2), (20, "MANIFEST.json", 3)):
        assert f"checkpoint step {step} FAILED" in text
        assert file in text
        assert f"failures: {count} of at most 4" in text
    assert "checkpoint step 25 committed" in text
    assert_same(run, twin)


def test_a_commit_implies_its_metrics(twin, run) -> None:
    """The run logs every 7 steps and saves every 5; a kill after a commit loses no metrics of committed steps."""
    assert finish(run, "pretrain.log_every=7", patch="killed_amid_a_window") == 0, output_of(run)
    _, again = read_metrics(stage(run), "start")
    assert again["step"] >= 10, "the save of step 15 may have been on its way"
    recorded: dict[int, list[int]] = {1: [], 2: []}  # by attempt: every step, once per record with its loss
    for record in read_metrics(stage(run)):
        steps_in_record = range(record["step"] - len(record["losses"]) + 1, record["step"] + 1)
        recorded[record["attempt"]] += steps_in_record
        assert len(record["grad_norms"]) == len(record["losses"])
    assert recorded[1] == [*range(1, 16)], "step 15 was recorded before its save began, 16 and 17 were not"
    assert recorded[2] == [*range(again["step"] + 1, 41)]
    assert_same(run, twin)
    assert step_losses(stage(run)).keys() == set(range(1, 41))

    shown = [int(step) for step in re.findall(r"^step (\d+)/40  loss", (stage(run) / "log.txt").read_text(), re.M)]
    multiples = [step for step in range(7, 40, 7) if step > again["step"] + 1]
    assert shown == [1, 7, 14, again["step"] + 1, *multiples, 40], "a save writes no line"


@pytest.mark.parametrize(("evaluate_every", "stopped"), [(8, 8), (0, 40)])
def test_stop_is_noticed_between_two_batches_of_an_evaluation(evaluate_every, stopped, few, twin, run) -> None:
    """During the steps, when step 8 would not be saved otherwise, and at the end."""
    options = [f"pretrain.evaluate_every={evaluate_every}", f"pretrain.data.evaluate={few}"]
    process = start(run, *options, patch="stopped_in_an_evaluation")
    judged = run.parent / "judged"
    while process.is_alive() and not (judged.exists() and judged.read_text().count("0") == 3):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 75, output_of(run)
    assert sorted(judged.read_text()) == ["0"] * 3 + ["1"] * 3, "of 8 batches each; none after the stop was there"
    assert read_manifest(committed(stage(run) / "checkpoints")[0]).step == stopped
    assert not read_metrics(stage(run), "evaluate")
    assert not (stage(run) / "incidents.txt").exists(), "a stop that was asked for is none"

    assert finish(run, *options) == 0, output_of(run)
    assert_same(run, twin)
    evaluated = [record["step"] for record in read_metrics(stage(run), "evaluate")]
    assert evaluated == list(range(stopped, 41, 8)), "also the one that was stopped, and each once"
    (record,) = [record for record in read_metrics(stage(run), "evaluate") if record["step"] == 40]
    assert record["judged"] == 60
    assert step_losses(stage(run)) == {step: losses[:1] for step, losses in step_losses(stage(twin)).items()}


def stop_at_the_first_batch(process: BaseProcess, run: Path) -> None:
    """Send SIGTERM to a driver whose worker 1 waits for its first batch; check its exit code and message."""
    while process.is_alive() and not (run.parent / "waiting").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=60)
    process.kill()  # if it did not react to the signal; an earlier exit code stays
    assert process.exitcode == 75, output_of(run)
    assert "stopped while waiting for the first batch" in output_of(run), output_of(run)


def test_stop_is_noticed_while_waiting_for_the_first_batch(run) -> None:
    process = start(run, patch="no_first_batch")
    stop_at_the_first_batch(process, run)
    assert "restarting" not in output_of(run)
    assert not committed(stage(run) / "checkpoints")
    (run.parent / "arrived").touch()
    assert finish(run, "pretrain.steps=5", patch="no_first_batch") == 0, output_of(run)


def test_stop_while_waiting_after_an_excluded_range_keeps_the_steps_before_it(run) -> None:
    stop_at(run, 6, "pretrain.log_every=1", patch="slowly")
    before = read_manifest(committed(stage(run) / "checkpoints")[0]).step
    # Simulate a fallback to an older checkpoint: the excluded range begins two steps after the loaded checkpoint.
    write_record(stage(run) / health.EXCLUDED_STEPS, {"stretches": [[before + 2, before + 4]]})
    process = start(run, patch="no_batch_behind_a_stretch")
    stop_at_the_first_batch(process, run)
    assert read_manifest(committed(stage(run) / "checkpoints")[0]).step == before + 2
    last = read_metrics(stage(run))[-1]
    assert last["step"] == before + 2, "a commit implies its metrics"


def damaged_shard(shards: Path) -> Path:
    """Flip a bit in the middle of a set's last shard, and return the shard."""
    shard = max(shards.glob("*.tar"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return shard


def test_few_shot_that_cannot_continue_reading_names_the_set_and_is_not_retried(twin, shards, tmp_path) -> None:
    """A byte is wrong in the last shard, which worker 1 reads."""
    train = tmp_path / "shards"
    shutil.copytree(training_set(twin), train)
    shard = damaged_shard(train)
    run = tmp_path / "run"
    assert finish(run, recipe=few_shot(twin, train, shards)) == 65, output_of(run)
    (folder,) = run.glob("fewshot-*")
    (incident,) = incidents(folder)
    assert f"EvaluationFailed: {train}: worker 1: DataError" in incident, output_of(run)
    assert shard.name in output_of(run), output_of(run)
    assert "run the same command again" in output_of(run)
    assert "restarting" not in output_of(run)


def test_a_sigterm_to_one_worker_of_few_shot_stops_all(twin, shards, tmp_path) -> None:
    run, recipe = tmp_path / "run", few_shot(twin, training_set(twin), shards)
    process = start(run, patch="slow_probe", recipe=recipe)
    while process.is_alive() and "evaluate" not in phase_of(run, 1):
        time.sleep(0.01)
    (record,) = run.glob("fewshot-*/attempts/attempt-000001/rank-00001.json")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGTERM)
    process.join(timeout=60)
    process.kill()
    assert process.exitcode == 75, output_of(run)
    assert "stopped between two batches; run the same command again" in output_of(run), output_of(run)


def test_failed_evaluation_causes_no_lost_step_or_restart(few, twin, run) -> None:
    """A byte is wrong in the evaluation's last shard, which worker 1 reads; later it is repaired."""
    evaluated = run.parent / "evaluated"
    shutil.copytree(few, evaluated)
    shard = damaged_shard(evaluated)
    options = ["pretrain.evaluate_every=10", f"pretrain.data.evaluate={evaluated}"]

    assert finish(run, *options) == 65, output_of(run)
    log = (stage(run) / "log.txt").read_text()
    for step, next_line in ((10, 12), (20, 24), (30, 32)):
        failed = log.index(f"evaluate step {step} FAILED ({evaluated}: worker 1: DataError")
        assert log.index(f"checkpoint step {step} committed") < failed < log.index(f"step {next_line}/40")
    assert [record["step"] for record in read_metrics(stage(run), "evaluate_failed")] == [10, 20, 30, 40]
    assert "the evaluation of step 40 failed" in output_of(run)
    assert shard.name in output_of(run)
    assert "to repeat the evaluation" in output_of(run)
    assert "restarting" not in output_of(run)
    (incident,) = incidents(stage(run))
    assert f"EvaluationFailed: the evaluation of step 40 failed: {evaluated}" in incident
    assert "in batches" in worker_log(run, 1), "where it failed"
    assert read_manifest(committed(stage(run) / "checkpoints")[0]).step == 40

    shutil.copy(few / shard.name, shard)
    assert finish(run, *options) == 0, output_of(run)
    assert_same(run, twin)
    assert [record["attempt"] for record in read_metrics(stage(run), "start")] == [1, 2]
    assert {record["attempt"] for record in read_metrics(stage(run))} == {1}, "no step was computed twice"
    (record,) = read_metrics(stage(run), "evaluate")
    assert (record["step"], record["judged"]) == (40, 60)


def test_too_many_failed_saves_in_a_row_exit_74(run) -> None:
    assert finish(run, "pretrain.max_failed_saves=2", patch="full_disk") == 74
    assert "2 consecutive saves failed, the last with: rank-00000.safetensors" in output_of(run)
    assert "No space left on device" in output_of(run)
    assert "restarting" not in output_of(run)


def test_a_stage_does_not_end_before_its_last_step_is_committed(twin, run) -> None:
    assert finish(run, patch="full_disk_at_the_end 40 2") == 0, output_of(run)
    assert output_of(run).count("checkpoint step 40 FAILED") == 2
    assert "checkpoint step 40 committed" in output_of(run)
    assert_same(run, twin)
    forget(run)
    assert finish(run, patch="full_disk_at_the_end 40 9") == 74, output_of(run)
    assert not (stage(run) / "weights.safetensors").exists()


def test_stop_with_a_failed_save_does_not_report_a_commit(run) -> None:
    assert stop_at(run, 3, "pretrain.log_every=1", "pretrain.max_failed_saves=9", patch="full_disk") == 75, output_of(
        run
    )
    assert "which could not be committed" in output_of(run)


@pytest.mark.parametrize("ends", ["a stop", pytest.param("going back", marks=pytest.mark.slow)])
def test_workers_that_end_leave_no_old_checkpoint_half_deleted(ends, run) -> None:
    options = ["pretrain.log_every=1", "pretrain.keep=2", "pretrain.save_every=2"]
    if ends == "a stop":
        assert stop_at(run, 5, *options, patch="slow_to_delete slowly") == 75, output_of(run)
    else:
        assert finish(run, *options, "pretrain.max_skipped=3", patch="slow_to_delete poisoned_for_ever") == 70
    assert not list((stage(run) / "checkpoints").glob(".tmp-*"))
    deletions = (run.parent / "deletions").read_text().split()
    assert deletions == ["begun", "done"] * max(1, len(deletions) // 2)


def test_unwritable_log_loses_lines_but_does_not_stop_the_run(twin, run) -> None:
    assert finish(run, patch="full_log") == 0, output_of(run)
    text = (stage(run) / "log.txt").read_text()
    assert "step 12/40" not in text
    assert "step 16/40" in text
    assert "lines lost: they could not be written to disk)" in text
    assert_same(run, twin)
    assert step_losses(stage(run)).keys() == set(range(1, 41)), "what was refused is in the next record"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=SOAK)])
def test_the_world_may_change_between_any_two_attempts(times, run) -> None:
    """World 1 → 2 → 4 → 2 with an indivisible batch: the same data, and losses equal up to rounding."""
    rng = random.Random(SEED + 3)
    uneven = ("pretrain.batch_size=19", "pretrain.uneven=true")
    alone = run.parent / "alone"
    shutil.copytree(run, alone)
    assert finish(alone, "cluster.workers=1", *uneven) == 0
    for _ in range(times):
        forget(run)
        worlds = (1, 2, 4, 2)
        for number, world in enumerate(worlds):
            options = (f"cluster.workers={world}", f"pretrain.zero={rng.choice((0, 1, 2, 3))}", *uneven)
            if number < len(worlds) - 1:
                target = number * 8 + rng.randrange(1, 4)
                assert stop_at(run, target, *options, patch="slowly") == 75, f"FAULT_SEED={SEED}\n{output_of(run)}"
            else:
                assert finish(run, *options, patch="slowly") == 0, f"FAULT_SEED={SEED}\n{output_of(run)}"
        ours, theirs = (read_manifest(committed(stage(r) / "checkpoints")[0]) for r in (run, alone))
        assert ours.ledger == theirs.ledger
        assert ours.step == theirs.step
        losses, reference = step_losses(stage(run)), step_losses(stage(alone))
        assert max(abs(losses[step][-1] - reference[step][0]) for step in reference if step in losses) < 1e-4


def test_exact_parts_keep_the_bits_if_world_size_or_zero_stage_changes(run) -> None:
    """World 1 → 2 → 4 → 2 at ZeRO 2 → 3 → 0 → 1 with all random operations, compared with one undisturbed worker."""
    options = ("exact_parts=4", "model.dropout=0.1", "mixup=0.2", "polyak=0.9", "checkpoint_blocks=1", "log_every=1")
    exact = [f"pretrain.{option}" for option in (*options, "steps=20")]
    alone = run.parent / "alone"
    shutil.copytree(run, alone)
    assert finish(alone, "cluster.workers=1", *exact) == 0, output_of(run)
    # For a range of worker counts: the largest that the batch and the parts allow, here four.
    some = "{least: 3, most: 7}"
    for number, (workers, zero) in enumerate([("1", 2), ("2", 3), (some, 0), ("2", 1)]):
        options = (f"cluster.workers={workers}", f"pretrain.zero={zero}", *exact)
        if number < 3:
            assert stop_at(run, number * 6 + 2, *options, patch="slowly") == 75, output_of(run)
        else:
            assert finish(run, *options, patch="slowly") == 0, output_of(run)
    worlds = [record["world"] for record in read_metrics(stage(run), "start")]
    assert worlds == [1, 2, 4, 2]
    assert output_of(run).count("exact in 4 parts: every step waits") == 5
    assert "results may differ bitwise" not in output_of(run)
    assert step_losses(stage(run)) == step_losses(stage(alone))
    assert whole_state(run) == whole_state(alone)


@pytest.mark.slow
def test_stop_commit_and_infinite_gradient_in_the_same_step_lose_nothing(run) -> None:
    """Compared with a run whose only fault is that gradient in step 13."""
    alone = run.parent / "alone"
    shutil.copytree(run, alone)
    assert finish(alone, "pretrain.log_every=1", patch="infinite_in_one_micro_batch 12") == 0, output_of(run)
    assert finish(run, "pretrain.log_every=1", patch="all_in_one_step 12") == 75, output_of(run)
    heard = output_of(run)
    assert "step 13: non-finite gradient; step skipped" in heard
    assert "stopped at step 13 after committing it" in heard
    assert "checkpoint step 10 committed" in heard.split("checkpoint step 13 committed")[0]
    assert read_manifest(committed(stage(run) / "checkpoints")[0]).updates == 12
    assert finish(run, "pretrain.log_every=1") == 0, output_of(run)

    ours, theirs = (read_manifest(committed(stage(r) / "checkpoints")[0]) for r in (run, alone))
    assert ours.files == theirs.files
    assert ours.ledger == theirs.ledger
    assert ours.updates == theirs.updates == 39
    assert json.dumps(step_losses(stage(run))) == json.dumps(step_losses(stage(alone)))
    assert [report["step"] for report in reports(run)] == list(range(1, 41))


@pytest.mark.slow
def test_run_that_rolls_back_commits_the_pending_save_and_skips_no_good_step(run) -> None:
    assert finish(run, "pretrain.max_skipped=3", patch="given_up_with_a_save_in_flight") == 0, output_of(run)
    assert "had non-finite gradients: rolling back to step 10, excluding steps 11 … 15" in output_of(run)


@pytest.mark.slow
def test_run_ended_by_bad_samples_commits_the_pending_save_and_leaves_no_partial_files(run) -> None:
    assert finish(run, patch="bad_samples_with_a_save_in_flight") == 65, output_of(run)
    assert "12 of 208 samples were bad, more than data.max_bad_fraction=0.001 allows" in output_of(run)
    checkpoints = stage(run) / "checkpoints"
    assert checkpoint_reader.verify(committed(checkpoints)[0]).step == 10
    assert not list(checkpoints.glob(".tmp-*"))


def whole_state(run: Path) -> dict[str, dict[str, list[float]]]:
    """Return every parameter's master, moments and average, assembled from the files of the last checkpoint."""
    last = committed(stage(run) / "checkpoints")[0]
    weights = models.load_weights(stage(run))[0]
    reader = checkpoint_reader.Reader(last, read_manifest(last).files)
    return {
        kind: {name: reader(name, kind, 0, weight.numel()).tolist() for name, weight in weights.items()}
        for kind in ("master", "exp_avg", "exp_avg_sq", "average")
    }


def test_a_stretch_of_non_finite_steps_is_excluded_once_and_spikes_are_kept_for_replay(run, capsys) -> None:
    assert finish(run, "pretrain.max_skipped=3", patch="poisoned_stretch") == 0, output_of(run)
    assert "had non-finite gradients: rolling back to step 10, excluding steps 11 … 15" in output_of(run)
    again = [record for record in read_metrics(stage(run)) if record["attempt"] == 2]
    assert again[0]["step"] == 16, "step 16 is poisoned too: skipped alone"
    assert math.isnan(again[0]["losses"][0]), "step 16 is poisoned too: skipped alone"
    last = read_manifest(committed(stage(run) / "checkpoints")[0])
    assert last.step == 40
    assert last.updates == 40 - 5 - 1  # five excluded, one skipped
    assert last.samples_seen == again[-1]["samples_seen"] == (40 - 5) * 16, "what is left out was never seen"
    for line in (stage(run) / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    # Lines at 20, 24, 28 …, saves at 20, 25, 30 …: each ends a record.
    assert [len(record["losses"]) for record in again] == [1, 4, 4, 1, 3, 2, 2, 3, 1, 4]
    first, second, jump = read_metrics(stage(run), "spike")
    assert (first["step"], second["step"], jump["step"]) == (13, 16, 36)
    assert not first["grad_norm"] <= first["limit"]
    assert [step["step"] for step in jump["recent"]] == [*range(16, 37)]
    assert jump["grad_norm"] > jump["limit"]
    assert [step["loss"] for step in jump["recent"][1:]] == [x for r in again[1:] for x in r["losses"]][:20]
    assert "step 36: gradient norm" in output_of(run)
    assert f"jobs replay {stage(run)} step=36" in output_of(run)
    assert main(["replay", str(stage(run)), "step=15"]) == 0
    assert main(["replay", str(run), "step=36"]) == 0
    out = capsys.readouterr().out
    assert "attempt 2: gradient norm" in out
    assert "(recorded with the spike at step 36: " in out


@pytest.mark.parametrize(("save_every", "left"), [(5, 10), pytest.param(2, 12, marks=pytest.mark.slow)])
def test_run_ends_with_70_if_rolling_back_does_not_help(run, save_every, left) -> None:
    """Also if a save happens during the bad steps."""
    options = ["pretrain.max_skipped=3", f"pretrain.save_every={save_every}"]
    assert finish(run, *options, patch="poisoned_for_ever") == 70
    assert f"excluding steps {left + 1} … 15 did not help" in output_of(run)
    assert "lower optim.lr" in output_of(run)
    last = committed(stage(run) / "checkpoints")[0]
    assert checkpoint_reader.verify(last).step == left


def test_replay_rebuilds_the_batch_that_the_ledger_counted(twin, tmp_path, capsys) -> None:
    assert main(["replay", str(twin), "step=13", "--to", str(tmp_path / "batch.npz")]) == 0
    out = capsys.readouterr().out
    assert "step 13, 16 samples of 16×16" in out
    assert f"loss {step_losses(stage(twin))[13][0]:.6f}" in out
    batch = np.load(tmp_path / "batch.npz")
    index = load_index(next(twin.glob("shards-*")) / "train")
    order = Order(index.shard_samples, seed=0, batch_size=16)
    ledger = Ledger.start(index.digest, 0)
    for step in range(15):
        ids = tuple(batch["ids"].T) if step == 12 else order.batch(step)
        ledger = ledger.update(step, *ids)
    saved = {read_manifest(c).step: read_manifest(c).ledger for c in committed(stage(twin) / "checkpoints")}
    assert saved.get(15, ledger.hex) == ledger.hex
    assert batch["images"].shape == (16, 16, 16, 3)
    ends = [record["ledger"] for record in read_metrics(stage(twin)) if record["step"] == 16]
    assert ends == [ledger.update(15, *order.batch(15)).hex]
    assert main(["replay", str(twin), "13th"]) == 64
    assert main(["replay", str(twin), "step=40"]) == 0
    assert main(["replay", str(twin), "step=41"]) == 64
    assert "step 41 is after the last step 40 of pretrain-" in capsys.readouterr().err


def test_the_time_of_a_run_adds_up(twin) -> None:
    (record,) = read_metrics(stage(twin), "effective")
    spent = sum(record[name] for name in ("start", "data", "compute", "checkpoint", "lost", "recovery", "other"))
    starts = read_metrics(stage(twin), "start")
    assert spent == pytest.approx(record["time"] - starts[0]["claimed"], abs=0.5)
    assert 0 < record["ratio"] < 1
    assert record["lost"] == record["recovery"] == 0


@pytest.mark.parametrize("starts", [2, pytest.param(20, marks=SOAK)])
def test_only_one_of_several_concurrent_runs_trains_and_the_others_exit_with_73(starts, twin, run) -> None:
    crowd = [start(run, patch="in_no_hurry") for _ in range(starts)]
    while sum(process.is_alive() for process in crowd) > 1:
        time.sleep(0.05)
    (run.parent / "go").touch()  # all others have exited: none found a finished run to skip
    for process in crowd:
        process.join()
    assert sorted(process.exitcode for process in crowd) == [0] + [73] * (starts - 1), output_of(run)
    assert output_of(run).count("is owned by process") == starts - 1
    assert_same(run, twin)


def test_best_checkpoint_is_exported_and_patience_ends_at_the_same_step_whatever_is_killed(few, run) -> None:
    """Kills between the commit of the last evaluated step and its evaluation, and before the stage's end.

    The expected result is derived by hand from a run that keeps all steps and has no `keep_best`.
    """
    options = [f"pretrain.data.evaluate={few}", "pretrain.evaluate_every=4", "pretrain.optim.lr=0.02"]
    everything = ["pretrain.save_every=4", "pretrain.keep_every=4"]
    assert finish(run, *options, *everything) == 0, output_of(run)
    accuracies = {step: values[0]["accuracy"] for step, values in evaluations(stage(run)).items() if values[0]}
    best, end, waited = 4, 40, 0
    for step, accuracy in sorted(accuracies.items())[1:]:
        if accuracy > accuracies[best]:
            best, waited = step, 0
        else:
            waited += 1
        if waited == 2:
            end = step
            break
    assert best + 8 == end < 40, f"the plain run's accuracies make no test: {accuracies}"
    commits = {read_manifest(folder).step: folder for folder in committed(stage(run) / "checkpoints")}
    expected = read_manifest(commits[best])
    whole = json.loads((stage(run) / "done.json").read_text())
    peak = max(accuracies.values())
    first = min(step for step, accuracy in accuracies.items() if accuracy == peak)
    assert whole["best"] == {"accuracy": {"value": peak, "step": first}}
    forget(run)

    kept = [*options, "pretrain.keep_best=accuracy", "pretrain.patience=2", "pretrain.keep=2"]
    assert finish(run, *kept, patch=f"driver_killed_before_the_evaluation_of {end}") == -signal.SIGKILL
    steps = {read_manifest(folder).step for folder in committed(stage(run) / "checkpoints")}
    newest = max(step for step in range(end) if step % 4 == 0 or step % 5 == 0)
    assert steps >= {best, newest, end}, "the newest two and the best, and one on its way out"
    assert len(steps) <= 4, "the newest two and the best, and one on its way out"
    assert finish(run, *kept, patch="driver_killed_at_the_end") == -signal.SIGKILL
    assert accuracies[end] == evaluations(stage(run))[end][0]["accuracy"]
    assert not (stage(run) / "done.json").exists()
    assert finish(run, *kept) == 0, output_of(run)

    done = json.loads((stage(run) / "done.json").read_text())
    found = checkpoint_reader.verify(found_folder(run, best))
    assert (found.files, found.ledger) == (expected.files, expected.ledger), "not the bits of the plain run's step"
    weights, _ = models.load_weights(stage(run))
    from_commit = checkpoint_reader.Reader(found_folder(run, best), found.files)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    assert all(tensor.equal(weights[name]) for name, tensor in from_commit.weights(shapes).items())
    value = accuracies[best]
    assert (done["step"], done["best"]) == (end, {"accuracy": {"value": value, "step": best}})
    told = {"metric": "accuracy", "value": value, "step": best, "samples_seen": 16 * best, "ledger": expected.ledger}
    assert done["kept"] == told == json.loads((stage(run) / "provenance.json").read_text())["kept"]
    assert done["metrics"] == {"accuracy": accuracies[end]}
    log = (stage(run) / "log.txt").read_text()
    assert f"accuracy has not improved in 2 evaluations (patience 2): the best is {value:.4f} at step {best}" in log
    assert f"done at step {end}: weights of step {best} with the best accuracy, {value:.4f}, in" in log
    # A manual prune does not delete it either.
    assert main(["checkpoints", "prune", str(run), "--keep", "2"]) == 0
    assert found_folder(run, best).is_dir()


def found_folder(run: Path, step: int) -> Path:
    """Return the folder of a committed step."""
    return next(folder for folder in committed(stage(run) / "checkpoints") if read_manifest(folder).step == step)


@pytest.mark.parametrize("frozen", ["driver and workers", "driver"])
def test_driver_that_wakes_up_after_a_takeover_of_its_run_exits_with_73_and_changes_nothing(frozen, twin, run) -> None:
    first = start(run, patch="hasty_lease")
    family = []

    def freeze() -> None:
        family.append(psutil.Process(first.pid))
        if frozen != "driver":
            family.extend(family[0].children(recursive=True))
        for process in family:
            process.suspend()

    at_step(run, first, 12, freeze)
    try:
        time.sleep(1.5)  # five periods: until then it may only be late
        assert finish(run, patch="hasty_lease") == 0, output_of(run)
        assert "taking over the run: process " in output_of(run)
        # Workers of the first attempt may write to that attempt's folder.
        kept = {}
        for path in run.rglob("*"):
            if path.is_file() and "attempt-000001" not in path.parts:
                kept[path] = path.read_bytes()
    finally:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()
    first.join(60)
    assert first.exitcode == 73, output_of(run)
    assert f"{run} was taken over by process" in output_of(run), output_of(run)
    changed = [path.name for path, content in kept.items() if path.read_bytes() != content]
    # A worker that wakes up just before it is killed may still report a step of its attempt.
    of_reports = {name for name in changed if name in ("metrics.jsonl", "log.txt") or name.startswith("events.")}
    assert set(changed) == of_reports, changed
    assert "ended with exit code" not in (run / "log.txt").read_text()
    assert_same(run, twin)


def test_a_run_is_stopped_by_its_lease_from_anywhere(run, capsys) -> None:
    first = start(run, patch="hasty_lease")
    at_step(run, first, 8, lambda: None)
    assert main(["stop", str(run)]) == 0
    first.join(60)
    assert first.exitcode == 75, output_of(run)
    out = capsys.readouterr().out
    assert f"asked process {first.pid} on " in out
    assert "the command has ended; for its result, run python -m jobs status " in out
    assert main(["stop", str(run)]) == 0
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"nothing to stop: process {first.pid} on " in out
    assert "(exit 75, " in out
