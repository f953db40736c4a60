"""A key depends on what a stage's output depends on, and on nothing else."""

import json
from pathlib import Path

import pytest

from data.errors import ConfigError
from jobs.resolved_recipe import Campaign
from pipeline import artifacts
from pipeline.config import digest
from tests.support import campaigns


def keys(recipe: Path, *overrides: str) -> dict[str, str]:
    return {stage.name: stage.key for stage in campaigns.load(recipe, list(overrides)).stages}


def changed(recipe: Path, *overrides: str) -> set[str]:
    """Return the stages whose keys change with overrides."""
    before = keys(recipe)
    after = keys(recipe, *overrides)
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("override", ["cluster.workers=1", "pretrain.log_every=1", "pretrain.micro_batch=2"])
def test_execution_settings_do_not_change_keys(recipe, override):
    assert changed(recipe, override) == set()


def test_evaluation_settings_do_not_change_keys(recipe, shards):
    assert changed(recipe, f"pretrain.data.evaluate={shards}/train") == set()


def test_a_change_changes_the_keys_of_all_later_stages(recipe):
    assert changed(recipe, "pretrain.optim.lr=1") == {"pretrain", "resize", "finetune", "fewshot"}
    assert changed(recipe, "resize.image_size=32") == {"resize", "finetune", "fewshot"}
    assert changed(recipe, "finetune.optim.lr=1") == {"finetune"}


def test_moving_a_data_set_does_not_change_keys(recipe, shards, tmp_path):
    (tmp_path / "elsewhere").symlink_to(shards)
    assert changed(recipe, f"pretrain.data.train={tmp_path}/elsewhere/train") == set()
    assert "pretrain" in changed(recipe, f"pretrain.data.train={shards}/test")


def test_the_key_of_a_figure_depends_on_its_tables_and_not_on_their_paths(recipe, tmp_path):
    figure = ["pretrain.sweep.seeds=[0,1]", "resize.init=@pretrain.seed-0", "graph.kind=figure"]
    own = [*figure, "graph.tables.t=@pretrain"]
    assert keys(recipe, *own)["graph"] != keys(recipe, *own, "pretrain.optim.lr=1")["graph"]

    elsewhere = []
    for name in ("a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        artifacts.write_record(folder / "sweep.json", {"rows": "other" if name == "c" else "same"})
        elsewhere.append(keys(recipe, *figure, f"graph.tables.t={folder}")["graph"])
    assert elsewhere[0] == elsewhere[1] != elsewhere[2]


def test_the_key_of_a_stage_without_defaults_is_the_digest_of_its_section_and_its_inputs(recipe):
    loaded = campaigns.load(recipe, [])
    parent = loaded.stage("pretrain").key
    identity = {"schema": 1, "kind": "resize", "config": {"image_size": 24}, "inputs": {"init": f"{parent}/"}}
    assert loaded.stage("resize").key == digest(json.loads(json.dumps(identity)))


def test_evaluation_settings_are_in_the_key_if_they_select_the_weights(recipe, shards):
    best = "pretrain.keep_best=accuracy"
    before = keys(recipe, best, "pretrain.evaluate_every=8")
    after = keys(recipe, best, "pretrain.evaluate_every=8", f"pretrain.data.evaluate={shards}/train")
    assert before["pretrain"] != after["pretrain"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "finetune.init=@fewshot",
            "finetune.init is @fewshot, which has no weights\n  expected @stage with a stage of kind",
        ),
        ("resize.init=@pretrain/part", "resize.init is @pretrain/part, which has no weights"),
        (
            "finetune.data.train=@resize/train",
            "a resize stage writes no data set\n  expected @STAGE/SET with a pack stage",
        ),
    ],
)
def test_a_reference_to_the_wrong_kind_of_output_is_refused(recipe, override, message):
    with pytest.raises(ConfigError) as error:
        campaigns.load(recipe, [override])
    assert message in str(error.value)


def test_missing_inputs_are_reported_and_the_stage_has_no_model(recipe, tmp_path):
    loaded: Campaign = campaigns.load(recipe, [f"resize.init={tmp_path}/nowhere"])
    stage = loaded.stage("resize")
    assert stage.missing[0].text == f"resize.init: no weights.safetensors in {tmp_path}/nowhere"
    assert stage.missing[0].path == f"{tmp_path}/nowhere"
    assert stage.model is None
