"""Recipes with token dropping: refused settings, and the lines of a plan."""

import pytest

import models
from data.errors import ConfigError
from jobs.extras.planning.plan import plan
from jobs.run.session import run_campaign
from pipeline.extras.plan.cost import Assumptions
from pipeline.training_config import flops_of
from tests.support import campaigns

# Steps 0 … 9 at 16 px with half of the patches, 10 … 17 at 24 px with half, 18 … 23 at 24 px with all.
TOKEN_DROPPING = (
    "pretrain.model.image_size=24",
    "pretrain.model.dropout=0.0",
    "pretrain.thinning.patch_dropout=0.5",
    "pretrain.thinning.patch_dropout_until=0.75",
    "pretrain.thinning.image_sizes=[16]",
    "pretrain.thinning.image_sizes_until=[0.42]",
)
MASKED = ("pretrain.model.name=Masked-mu/8", "pretrain.objective=masked", "pretrain.data.evaluate=null")


def test_plan_counts_dropped_tokens_and_lists_the_phases(recipe):
    loaded = campaigns.load(recipe, list(TOKEN_DROPPING))
    text = "\n".join([*plan(loaded, Assumptions(), print)["report"], ""])
    model = loaded.stage("pretrain").model
    whole = 24 * 16 * 6 * models.macs_of(model)
    flops = flops_of(loaded.stage("pretrain").config.phases(24, model), model, range(24), 16)
    assert f"{flops / whole:.2f} × the {whole / 1e18:.4g} with whole images" in text
    assert "phase   steps 0 … 9: 16 px, 2 of 4 patches\n" in text
    assert "phase   steps 10 … 17: 24 px, 4 of 9 patches\n" in text
    assert "phase   steps 18 … 23: 24 px\n" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("pretrain.thinning.patch_dropout=1.0",), "expected 0 .off. to less than 1"),
        (("pretrain.thinning.patch_dropout_until=0.0",), "expected a fraction of the steps"),
        (("pretrain.thinning.image_sizes=[16]",), "one fraction of the steps for each size"),
        ((*TOKEN_DROPPING, "pretrain.thinning.image_sizes_until=[1.0]"), "increasing fractions of the steps"),
        (
            (*TOKEN_DROPPING, "pretrain.thinning.image_sizes=[12]"),
            "multiples of 8 below model.image_size 24, for example 8",
        ),
        ((*TOKEN_DROPPING, "pretrain.thinning.image_sizes=[24]"), "below model.image_size 24, for example 16"),
        ((*TOKEN_DROPPING, "pretrain.model.positions=relative"), "relative positions"),
        ((*TOKEN_DROPPING, "pretrain.model.positions_at=every"), "every layer adds its positions"),
        (
            (*TOKEN_DROPPING, "pretrain.model.name=Axial-mu/8"),
            "classification with plain or hybrid ViTs; found family axial",
        ),
        ((*TOKEN_DROPPING, *MASKED), "found family masked, objective masked"),
    ],
)
def test_token_dropping_is_refused_if_the_stage_cannot_use_it(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        loaded = campaigns.load(recipe, list(overrides))
        run_campaign(loaded, only="pretrain", quiet=True)
