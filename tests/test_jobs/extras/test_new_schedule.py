"""The advice to start a new schedule from a checkpoint; tests of `run` with a changed length print it."""

import pytest

from jobs.extras.new_schedule import NewSchedule
from jobs.resolved_recipe import Available
from tests.support import campaigns

pytestmark = pytest.mark.quick


def test_the_newest_checkpoint_of_an_unfinished_stage_is_named(recipe, tmp_path):
    campaign = campaigns.load(recipe, [])
    folder = tmp_path / "my run" / "pretrain-1a2b3c4d"
    ways = NewSchedule().ways_to_train_longer
    stage = campaign.stage("pretrain")
    assert list(ways(stage, folder, Available(campaign))) == []
    for step in (20, 100):
        (folder / "checkpoints" / f"step-{step:010d}").mkdir(parents=True)
    (way,) = ways(stage, folder, Available(campaign))
    assert f"python -m jobs export '{folder}/step-100' FOLDER, then add pretrain.init=FOLDER --fresh" in way
    (folder / "done.json").write_text("{}")
    assert list(ways(stage, folder, Available(campaign))) == []
