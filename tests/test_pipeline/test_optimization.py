"""Optimizers and schedules, compared with arrays from the original code."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from data.errors import ConfigError
from pipeline.optimization import OptimConfig, ScheduleConfig, build_optimizer, learning_rate
from tests.support.golden import read_golden

pytestmark = pytest.mark.quick


def schedule_of(case: dict) -> ScheduleConfig:
    settings = case["kwargs"]
    return ScheduleConfig(
        decay=settings["decay_type"],
        warmup_steps=settings.get("warmup_steps", 0),
        end=1e-5 if case["kind"] == "vit_jax" else 0.0,  # big_vision's linear ends at 0 by default
        timescale=settings.get("timescale", 10_000),
        cooldown_steps=settings.get("cooldown_steps", 0),
    )


def test_schedules_match_golden_values():
    arrays = read_golden("lr_schedules.npz")
    cases = json.loads(str(arrays["cases_json"]))
    for number, case in cases.items():
        total, peak = case["kwargs"]["total_steps"], case["kwargs"]["base"]
        ours = [learning_rate(int(s), total, peak, schedule_of(case)) for s in arrays[f"steps_{number}"]]
        np.testing.assert_allclose(
            ours, arrays[f"lr_{number}"], rtol=1e-5, atol=3e-8 * peak
        )  # the original computes in float32
    assert len(cases) == 5


def flat_model(arrays) -> tuple[nn.Module, dict[str, str]]:
    """Return the golden parameters under names without slashes, and those names by golden key."""
    keys = [key.removeprefix("init/") for key in arrays.files if key.startswith("init/")]
    model = nn.Module()
    names = {key: key.replace("/", "-").replace("head-", "head.") for key in keys}
    model.add_module("head", nn.Module())
    for key, name in names.items():
        owner, leaf = (model.head, name.removeprefix("head.")) if "." in name else (model, name)
        owner.register_parameter(leaf, nn.Parameter(torch.from_numpy(arrays[f"init/{key}"]).clone()))
    return model, names


def config_of(meta: dict) -> tuple[OptimConfig, float, int]:
    """Convert the original's settings: its decay is not multiplied by the rate, torch's is (SPEC 2.2)."""
    if "momentum" in meta:
        schedule = ScheduleConfig(decay=meta["decay"], warmup_steps=meta["warmup_steps"])
        cfg = OptimConfig(name="sgd", lr=meta["base_lr"], weight_decay=0.0, clip=meta["clip"], schedule=schedule)
        return cfg, meta["clip"], meta["total_steps"]
    settings = meta["schedule"]
    schedule = ScheduleConfig(
        decay=settings["decay_type"],
        warmup_steps=settings["warmup_steps"],
        timescale=settings.get("timescale", 10_000),
        cooldown_steps=settings.get("cooldown_steps", 0),
    )
    decay = meta["wd"] / meta["lr"]
    head = dict(meta.get("wd_mults", [])).get(".*head/kernel")
    clip = meta.get("grad_clip_norm", 0.0)
    head_decay = None if head is None else decay * head
    cfg = OptimConfig(lr=meta["lr"], weight_decay=decay, head_weight_decay=head_decay, clip=clip, schedule=schedule)
    return cfg, clip, meta["total_steps"]


@pytest.mark.parametrize("name", ["optim_pretrain_adam", "optim_pretrain_adam_headwd_noclip", "optim_finetune_sgd"])
def test_every_optimizer_step_matches_the_original(name):
    arrays = read_golden(f"{name}.npz")
    cfg, clip, total = config_of(json.loads(str(arrays["meta_json"])))
    model, names = flat_model(arrays)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(model, {n for key, n in names.items() if key.endswith("/kernel")}, cfg)
    for step in range(total):
        for key, ours in names.items():
            parameters[ours].grad = torch.from_numpy(arrays[f"grad_{step}/{key}"])
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total, cfg.lr, cfg.schedule)
        optimizer.step()
        for key, ours in names.items():
            expected = arrays[f"param_after_{step}/{key}"]
            np.testing.assert_allclose(parameters[ours].detach().numpy(), expected, atol=1e-6, err_msg=f"{step} {key}")


def test_only_kernels_have_weight_decay():
    model = nn.Linear(3, 2)
    groups = build_optimizer(model, {"weight"}, OptimConfig(weight_decay=0.1)).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.1), (1, 0.0)]


def test_step_keeps_torchs_hooks_and_profiler_name():
    model = nn.Linear(3, 2)
    torchs = torch.optim.AdamW(model.parameters())
    seen = []
    for optimizer in (build_optimizer(model, {"weight"}, OptimConfig()), torchs):
        calls: list[object] = []
        every = register_optimizer_step_pre_hook(lambda *_, calls=calls: calls.append("every optimizer's"))
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(("before", torch.is_grad_enabled())))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(("after", torch.is_grad_enabled())))
        with torch.profiler.profile() as profile:
            optimizer.step(lambda calls=calls: calls.append(("closure", torch.is_grad_enabled())))
        every.remove()
        calls += [event.key for event in profile.key_averages() if event.key.startswith("Optimizer.")]
        seen.append(calls)
    assert seen[0] == seen[1], seen
    assert len(seen[0]) == 5, seen


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"weight_decay": -1}, {"clip": -0.1}, {"beta2": 1.0}, {"momentum": 1.5}])
def test_ranges_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OptimConfig(**wrong)


@pytest.mark.parametrize(("supports", "peak"), [((100, 200, 300, 400, 500), 0.003), ((7, 11, 30, 41), 0.5)])
def test_staircase_schedule_matches_the_bit_rule(supports, peak):
    """Compare with an independent loop: a linear rise, and a division by ten after each drop step."""
    first, *drops, steps = supports
    schedule = ScheduleConfig(decay="constant", warmup_steps=first, drops=tuple(drops))
    rate = peak
    for step in range(steps):
        if step - 1 in drops:
            rate /= 10
        expected = peak * step / first if step < first else rate
        assert learning_rate(step, steps, peak, schedule) == pytest.approx(expected, rel=1e-12)
    assert rate == pytest.approx(peak / 10 ** len(drops))


@pytest.mark.parametrize("fields", [{"drops": (5,)}, {"decay": "constant", "drops": (5, 5)}])
def test_drops_must_ascend_and_need_a_constant_schedule(fields):
    with pytest.raises(ConfigError, match=r"expected increasing steps, for example .*, and decay: constant"):
        ScheduleConfig(**fields)
