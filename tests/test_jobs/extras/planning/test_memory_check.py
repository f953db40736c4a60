"""A stage that does not fit its devices is refused; a stage whose need is unknown is not."""

import dataclasses

import pytest

from jobs.__main__ import main
from jobs.terminal import activity
from pipeline.extras.plan import memory
from pipeline.extras.plan.memory import GIB, memory_need
from tests.support.campaigns import load
from tests.support.hand_traces import trace_by_hand


@pytest.fixture(autouse=True)
def untraced(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace steps for real in these tests, with a separate cache for this session."""
    folder = tmp_path_factory.getbasetemp() / "traces"
    monkeypatch.setenv("PATCHLINE_CACHE", str(folder))


@pytest.fixture
def traced_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have the memory of `trace_by_hand`."""
    monkeypatch.setattr(memory, "trace_of", trace_by_hand)


def test_a_stage_with_patch_dropout_to_the_end_is_not_refused(recipe, capsys, traced_by_hand):
    limited = ["cluster.gpus_per_worker=1", "cluster.gpu_memory_gb=5", "pretrain.zero=1", "finetune.zero=2"]
    limited += ["finetune.micro_batch=4", "pretrain.thinning.patch_dropout=0.5"]
    assert main(["plan", str(recipe), *limited]) == 0
    out = capsys.readouterr().out
    assert "(checkpoint_blocks=0); this is for whole images, so the actual need with patch dropout" in out
    assert "pretrain: cannot determine whether it fits into cluster.gpu_memory_gb=5 with patch dropout" in out
    # If the last steps see whole images, the stage is refused.
    assert main(["plan", str(recipe), *limited, "pretrain.thinning.patch_dropout_until=0.9"]) == 78
    assert "pretrain: a worker needs 6.0 GiB" in capsys.readouterr().err


def test_a_compiled_stage_has_an_unknown_need_and_is_not_refused(recipe, capsys, traced_by_hand):
    """Without compilation it would need 6 GiB."""
    limited = ["cluster.gpus_per_worker=1", "cluster.gpu_memory_gb=5", "pretrain.zero=1", "finetune.zero=2"]
    limited += ["finetune.micro_batch=4", "pretrain.compile=true"]
    assert main(["plan", str(recipe), *limited]) == 0
    out = capsys.readouterr().out
    assert "memory  unknown: steps with compile: true cannot be traced" in out
    assert "unknown for pretrain" in out
    assert "pretrain: cannot determine whether it fits into cluster.gpu_memory_gb=5: steps with compile: true" in out

    stage = load(recipe, limited).stage("pretrain")
    assert memory.need_if_traced(stage.config, stage.model, 2, is_gpu=True) is None
    uncompiled = dataclasses.replace(stage.config, compile=False)
    assert memory_need(uncompiled, stage.model, 2, is_gpu=True).device_bytes == 6 * GIB


def test_plan_lists_the_parts_of_the_memory_and_exits_like_run_if_they_do_not_fit(recipe, capsys, traced_by_hand):
    gpu = ["cluster.gpus_per_worker=1", "pretrain.zero=1", "finetune.zero=1"]
    assert main(["plan", str(recipe), *gpu]) == 0
    out = capsys.readouterr().out
    assert "memory  6.0 GiB per worker, peak in backward: 4.0 GiB activations + 2.0 GiB weights and optimizer" in out
    for command in ("plan", "run"):
        assert main([command, str(recipe), *gpu, "cluster.gpu_memory_gb=5"]) == 78
        assert "set one of these: pretrain.micro_batch=2 (needs 4.0 GiB); " in capsys.readouterr().err


def test_slow_plan_says_which_stage_of_how_many_it_estimates(recipe, capsys, monkeypatch):
    def trace(step, report):
        report("estimating a step …")
        return trace_by_hand(step, report)

    shown: list[str] = []
    monkeypatch.setattr(memory, "trace_of", trace)
    monkeypatch.setattr(activity, "now", shown.append)
    monkeypatch.setattr(activity, "text", "plan: starting …")
    gpu = ["cluster.gpus_per_worker=1", "pretrain.zero=1", "finetune.zero=1", "cluster.gpu_memory_gb=24"]
    assert main(["plan", str(recipe), *gpu]) == 0
    assert "pretrain, stage 1 of 2 that train: estimating a step …" in shown
    assert "finetune, stage 2 of 2 that train: estimating a step …" in shown
    # `run` shows no activity, so it writes a line.
    monkeypatch.setattr(activity, "text", "")
    assert main(["run", str(recipe), *gpu[:-1], "cluster.gpu_memory_gb=5"]) == 78
    assert "pretrain, stage 1 of 2 that train: estimating a step …\n" in capsys.readouterr().err


def test_plan_of_a_stage_whose_states_exceed_the_memory_traces_nothing(recipe, capsys, monkeypatch):
    def refuse(step, report):
        raise AssertionError("traced")

    monkeypatch.setattr(memory, "trace_of", refuse)
    limited = ["cluster.gpus_per_worker=1", "cluster.gpu_memory_gb=1e-6"]
    assert main(["plan", str(recipe), *limited]) == 78
    output = capsys.readouterr()
    assert "for weights, gradients and optimizer state alone, but only" in output.err
    assert "fits    NO: too little memory per worker for pretrain, finetune" in output.out
