"""Resized weights have the golden position embeddings; all other tensors are unchanged."""

from pathlib import Path

import torch

import models
from jobs.kinds import load_kinds
from jobs.recipe import campaign
from jobs.resolved_recipe import Context
from tests.support.campaigns import CORE


def test_only_position_embeddings_change_with_the_image_size(tmp_path: Path) -> None:
    before = models.from_config(models.config_of("mu/8", 16, 10), torch.Generator().manual_seed(0))
    models.save(before, tmp_path / "weights")
    (tmp_path / "recipe.yaml").write_text(
        f"run: {tmp_path}/run\nresize: {{init: {tmp_path}/weights, image_size: [16, 32]}}\n"
    )
    loaded = campaign.load(tmp_path / "recipe.yaml", [], load_kinds(CORE))
    stage = loaded.stage("resize")
    loaded.directory(stage).mkdir(parents=True)
    lines: list[str] = []
    context = Context(loaded, stage, lines.append, poll=lambda attempt, step: None, stop_requested=lambda: False)
    outcome = stage.kind.run(stage.config, context)
    weights, config = models.load_weights(loaded.directory(stage))
    assert config.image_size == (16, 32)
    assert outcome["resized"] == 1
    state = before.state_dict()
    (position,) = [name for name in state if state[name].shape != weights[name].shape]
    # The class token, and 2 × 4 patches instead of 2 × 2.
    assert weights[position].shape[-2] == 1 + 2 * 4
    for name, tensor in weights.items():
        if name != position:
            assert torch.equal(tensor, state[name]), name
