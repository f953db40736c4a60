"""Two flat parameters per block, compared with plain models."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import models
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.engine.flat_blocks import FlatBlocks
from tests.support import ranks

SMALL = {"depth": 2, "width": 16, "mlp": 32, "heads": 2}
FAMILIES: list[tuple[str, int, dict[str, Any]]] = [
    ("mu/8", 16, SMALL),
    ("mu/8", 16, {**SMALL, "pool": "map", "positions": "relative", "positions_at": "shared"}),
    ("Axial-mu/8", 16, SMALL),
    ("Masked-mu/8", 16, SMALL),
    ("R50+mu/16", 32, {**SMALL, "stem": (1, 1, 1), "stem_width": 32}),
    ("BiT-R50x1", 32, {"units": (1, 1), "width": 32}),
]


def flattened(model: models.Model) -> FlatBlocks:
    flat_blocks = FlatBlocks(model, models.decayed_parameters(model))
    with flat_blocks.during_deepspeed_setup():
        pass
    return flat_blocks


def summed(model: models.Model, images: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on the whole output of the model."""
    if model.config.family == "masked":
        predictions, answers = model(images, torch.Generator().manual_seed(0))
        return F.cross_entropy(predictions.flatten(0, 2), answers.flatten(), reduction="sum")
    return (model(images) * torch.linspace(-1, 1, model.config.classes)).sum()


def drawn(name: str, size: int, options: dict[str, Any]) -> models.Model:
    torch.manual_seed(0)
    model = models.build(name, size, 5, **options)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape), alpha=0.1)
    return model


@pytest.mark.parametrize(("name", "size", "options"), FAMILIES)
@pytest.mark.parametrize("recomputed", [0, 2])
def test_flat_blocks_have_outputs_and_gradients_of_the_plain_model(name, size, options, recomputed):
    plain, flat = drawn(name, size, options), drawn(name, size, options)
    plain.recomputed_blocks = flat.recomputed_blocks = recomputed
    members = flattened(flat).members
    assert list(members) == [name for name, _ in plain.named_parameters()]

    images = torch.linspace(-1, 1, 2 * 3 * size**2).view(2, 3, size, size)
    losses = []
    for model in (plain, flat):
        losses.append(summed(model, images))
        losses[-1].backward()
    assert torch.equal(*losses)
    holders = dict(flat.named_parameters())
    for name, parameter in plain.named_parameters():
        member = members[name]
        holder = holders[member.holder]
        span = slice(member.start, member.start + member.size)
        assert torch.equal(holder.detach().flatten()[span], parameter.detach().flatten()), name
        if parameter.grad is None:  # in the masked model, whose loss does not use the class token
            assert holder.grad is None, name
        else:
            assert torch.equal(holder.grad.flatten()[span], parameter.grad.flatten()), name


def test_kernels_and_rest_are_separate_and_every_element_is_held_once():
    model = drawn(*FAMILIES[4])
    decayed = models.decayed_parameters(model)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    flat_blocks = flattened(model)
    holders = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    for name, member in flat_blocks.members.items():
        assert member.size == sizes[name]
        assert (member.holder in flat_blocks.decayed) == (name in decayed), name
        holders[member.holder][member.start : member.start + member.size] += 1
    assert all((count == 1).all() for count in holders.values())


def test_the_392_parameters_of_h14_become_72():
    with torch.device("meta"):
        model = models.build("H/14")
    assert len(list(model.parameters())) == 392
    flattened(model)
    assert len(list(model.parameters())) == 8 + 32 * 2


@pytest.mark.parametrize(("name", "size", "options"), [FAMILIES[0], FAMILIES[4]])
def test_layers_have_weights_only_while_their_block_computes(name, size, options):
    model = drawn(name, size, options)
    flattened(model)
    for _ in range(2):
        model(torch.zeros(1, 3, size, size))
    block = model.blocks[0]
    with pytest.raises(RuntimeError):
        block(torch.zeros(1, 4, 15))
    asked = 0
    for of_model in models.blocks(model).values():
        for layer in of_model.modules():
            if "weight" in vars(layer):
                asked += 1
                channels = getattr(layer, "in_channels", getattr(layer, "num_channels", 16))
                plain = isinstance(layer, torch.nn.Linear | torch.nn.LayerNorm)
                with pytest.raises((RuntimeError, IndexError)):
                    layer(torch.zeros(1, 4, 16) if plain else torch.zeros(1, channels, 8, 8))
    assert asked == (2 * 6 if name == "mu/8" else 2 * 6 + 3 * 8)
    assert "in_features=16, out_features=48, bias=True" in repr(block)
    model.eval()
    assert not block.mlp.dropout.training


# ------------------------------------------------------------------------------------------- under DeepSpeed


def case(
    zero: int, precision: str = "fp32", recomputed: int = 0, exact: bool = False, compiled: str = ""
) -> dict[str, Any]:
    return {"zero": zero, "precision": precision, "recomputed": recomputed, "exact": exact, "compiled": compiled}


CASES = [case(0), case(1), case(2, recomputed=2), case(3, recomputed=2), case(3, exact=True)]
CASES += [case(2, "bf16"), case(3, "bf16", recomputed=2)]
# torch.compile without its kernels, whose C++ takes minutes to build.
CASES += [case(2, compiled="aot_eager"), case(3, recomputed=2, exact=True, compiled="aot_eager")]
NUMBERS = range(len(CASES))
# With two micro-batches per step on each of two workers.
COMPILED = []
for zero, recomputed, exact in itertools.product(range(4), (0, 2), (False, True)):
    COMPILED.append(case(zero, "fp32", recomputed, exact, "inductor"))
for zero, exact in itertools.product((1, 2, 3), (False, True)):
    COMPILED.append(case(zero, "bf16", 0, exact, "inductor"))


# Switches of later ViTs in exact mode, with compiled and recomputed blocks.
SWITCHES: dict[str, dict[str, Any]] = {
    "pre_norm, layer_scale": {"pre_norm": True, "patch_bias": False, "layer_scale": 0.1},
    "qk_norm, pool_norm": {"qk_norm": True, "last_norm": "pooled"},
    "swiglu, registers": {"activation": "swiglu", "mlp_norm": True, "registers": 2, "pool": "token"},
    "rope": {"rope": "dinov3", "positions": "none", "qkv_bias": "qv", "attention_norm": True},
    "rope mixed, rms": {"rope": "mixed", "norm": "rms", "patch_norm": True, "block_bias": False},
}


@functools.cache
def in_plain_torch(
    count: int, **switches: Any
) -> tuple[list[float], dict[str, dict[str, torch.Tensor]], torch.nn.Module]:
    """Run the same steps in plain torch; return losses, the optimizer's state by name, and the model."""
    model = ranks.model_of_blocks(**switches)
    kernels, rest = [], []
    for name, p in model.named_parameters():
        (kernels if name.endswith(".weight") and p.ndim > 1 else rest).append(p)
    groups = [{"params": kernels, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    losses, average = [], {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(count):
        images, labels = ranks.images_of(step)
        loss = F.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = {name: 0.9 * average[name] + 0.1 * p.detach() for name, p in model.named_parameters()}
    state = {}
    for name, p in model.named_parameters():
        moments = {kind: optimizer.state[p][kind] for kind in ("exp_avg", "exp_avg_sq")}
        state[name] = {"master": p.detach(), "average": average[name], **moments}
    return losses, state, model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the results of two workers in every case, and the folder with their states."""
    return train_all(CASES, tmp_path_factory)


def train_all(
    cases: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory, workers: int = 2
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("blocks")
    torch.save(in_plain_torch(2)[2].state_dict(), folder / "plain.pt")
    task = {"cases": cases, "plain": str(folder / "plain.pt"), "folder": str(folder)}
    cluster = ClusterConfig(workers=workers, backend="processes")
    return folder, run_worker_group(ranks.train_blocks, task, cluster=cluster, name="blocks", directory=folder)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: "-".join(map(str, CASES[number].values())))
def test_every_stage_trains_every_parameter_like_plain_torch(trained, number):
    assert_trained_as_plain(*trained, number, CASES[number])


@pytest.mark.slow
def test_compiled_blocks_train_every_parameter_at_every_stage(tmp_path_factory):
    folder, results = train_all(COMPILED, tmp_path_factory)
    for number, each in enumerate(COMPILED):
        assert_trained_as_plain(folder, results, number, each)
        assert results[number]["restored"] or each["precision"] == "bf16", each


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """Return, for one and two workers, the results of a case for each of SWITCHES."""
    cases = []
    for name, switches in SWITCHES.items():
        plain = tmp_path_factory.mktemp("plain") / "plain.pt"
        torch.save(in_plain_torch(2, **switches)[2].state_dict(), plain)
        zero = 3 if "rope" in name else 2
        compiled = case(zero, recomputed=2, exact=True, compiled="aot_eager")
        cases.append({**compiled, "switches": switches, "plain": str(plain)})
    results = {}
    for workers in (1, 2):
        results[workers] = train_all(cases, tmp_path_factory, workers)
    return results


@pytest.mark.slow  # compiling takes half a minute, and minutes on a busy machine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SWITCHES)
def test_models_with_switches_train_like_plain_torch_in_exact_mode_and_compiled(switched, name):
    number = list(SWITCHES).index(name)
    for folder, results in switched.values():
        assert_trained_as_plain(folder, results, number, {"precision": "fp32", "switches": SWITCHES[name]})
        assert results[number]["restored"]
    one, two = (torch.load(folder / f"{number}.pt") for folder, _ in switched.values())
    for parameter, kinds in one.items():
        for kind, value in kinds.items():
            assert torch.equal(value, two[parameter][kind]), (parameter, kind)


def assert_trained_as_plain(
    folder: Path, results: list[dict[str, Any]], number: int, trained_case: dict[str, Any]
) -> None:
    """Assert that losses, master weights, moments and averages match plain torch with uncompiled blocks."""
    losses, expected, _ = in_plain_torch(3, **trained_case.get("switches", {}))
    is_bf16 = trained_case["precision"] == "bf16"
    assert results[number]["losses"] == pytest.approx(losses, abs=2e-2 if is_bf16 else 2e-6)
    state = torch.load(folder / f"{number}.pt")
    assert list(state) == list(expected)
    for name, kinds in expected.items():
        for kind, value in kinds.items():
            found = state[name][kind].view(value.shape)
            if is_bf16:
                # bf16 gradients are off by a few per cent; those of another parameter would be completely different.
                if kind == "exp_avg":
                    assert F.cosine_similarity(found.flatten(), value.flatten(), dim=0) > 0.9, (name, kind)
            # The true gradient is zero, because adding a vector to all keys does not change the softmax.
            elif ("qkv.bias" not in name and "k_norm.bias" not in name) or kind.startswith("exp"):
                torch.testing.assert_close(found, value, rtol=2e-3, atol=2e-5, msg=lambda text, of=name: f"{of} {text}")


@pytest.mark.parametrize("number", NUMBERS)
def test_weights_written_by_name_are_restored_to_the_bit_and_compute_the_same_bits(trained, number):
    assert trained[1][number]["restored"]


@pytest.mark.parametrize("number", NUMBERS)
def test_averaged_also_applies_to_flat_blocks(trained, number):
    _, state, trained_model = in_plain_torch(3)
    model = ranks.model_of_blocks()
    with torch.no_grad():
        before = trained_model(ranks.images_of(0)[0])
        model.load_state_dict({name: kinds["average"] for name, kinds in state.items()})
        expected = model(ranks.images_of(0)[0])
    found = torch.tensor(trained[1][number]["averaged"])
    tolerance = 5e-2 if CASES[number]["precision"] == "bf16" else 2e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert (before - expected).abs().max() > 2 * tolerance


@pytest.mark.parametrize("number", NUMBERS)
def test_deepspeed_sees_two_parameters_per_block_and_hooks_only_blocks(trained, number):
    result = trained[1][number]
    assert result["parameters"] == 7 + 3 * 2
    assert result["layers_hold"] == 0
    for hooks in result["hooks"]:
        # The hook that splits the block comes after the one that gathers it, and its layers have no hooks.
        assert hooks[-1] == "Views.set_views"
        assert hooks.count("Views.set_views") == 1
        assert len(hooks) == (3 if CASES[number]["zero"] == 3 else 1)
