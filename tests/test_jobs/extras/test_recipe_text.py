"""A resolved recipe as text, and conversions between nested sections and dotted names."""

from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from data.errors import ConfigError
from jobs.commands.campaigns import shipped
from jobs.extras.recipe_text import describe_value, flat, resolved, with_fields
from jobs.recipe.references import with_values
from tests.support import campaigns
from tests.support.choosers import finish_chooser, load_chooser

ROOT = Path(__file__).parents[3]


def test_a_resolved_recipe_contains_every_default_and_gives_the_same_keys(recipe, tmp_path):
    loaded = campaigns.load(recipe, [])
    sections = yaml.safe_load(resolved(loaded))
    assert sections["pretrain"]["optim"]["lr"] == 2e-3
    assert sections["pretrain"]["optim"]["beta1"] == 0.9
    reloaded = tmp_path / "resolved.yaml"
    reloaded.write_text(resolved(loaded))
    keys = {stage.name: stage.key for stage in campaigns.load(reloaded, [f"run={tmp_path}/run"]).stages}
    assert keys == {stage.name: stage.key for stage in loaded.stages}


def test_the_first_run_of_a_section_is_written_in_full_and_the_others_as_differences(recipe):
    loaded = campaigns.load(recipe, ["finetune.sweep={seeds: [0, 1]}"])
    sections = yaml.safe_load(resolved(loaded))
    assert sections["finetune.seed-0"]["seed"] == 0
    assert sections["finetune.seed-1"] == {"as": "finetune.seed-0", "but": {"seed": 1}}
    assert sections["finetune"]["kind"] == "sweep"


@pytest.mark.quick
def test_flat_names_every_value_by_its_path():
    fields = {"optim": {"lr": 1, "schedule": {"warmup_steps": 2}}, "data.train": "x", "model": {}}
    assert flat(fields, "p") == {"optim.lr": 1, "optim.schedule.warmup_steps": 2, "data.train": "x", "model": {}}


@pytest.mark.quick
def test_flat_refuses_a_field_given_both_dotted_and_nested():
    with pytest.raises(ConfigError, match=r"p sets optim\.lr twice"):
        flat({"optim": {"lr": 1}, "optim.lr": 2}, "p")


@pytest.mark.quick
def test_with_fields_changes_a_copy_and_creates_missing_sections():
    section = {"optim": {"lr": 1}, "probe": None}
    changed = with_fields(section, {"optim.lr": 2, "data.train": "x", "probe.shots": [1]}, "p")
    assert changed == {"optim": {"lr": 2}, "data": {"train": "x"}, "probe": {"shots": [1]}}
    assert section == {"optim": {"lr": 1}, "probe": None}


@pytest.mark.quick
def test_with_fields_refuses_a_path_through_a_value():
    with pytest.raises(ConfigError, match=r"p sets optim\.lr, but optim is 3, expected a section"):
        with_fields({"optim": 3}, {"optim.lr": 2}, "p")


@pytest.mark.parametrize("name", shipped())
def test_all_defaults_of_a_recipe_are_recorded(name):
    """The full text is recorded for each recipe; for studies, which repeat defaults for up to 60 runs, its sha256."""
    text = resolved(campaigns.load(ROOT / "jobs" / "recipes" / f"{name}.yaml", []))
    if name.startswith("studies/"):
        recorded = dict(line.split() for line in (ROOT / "tests" / "recipes" / "studies.txt").read_text().splitlines())
        assert recorded[name] == sha256(text.encode()).hexdigest(), f"python -m jobs plan {name} --resolved | sha256sum"
        return
    expected = ROOT / "tests" / "recipes" / f"{name}.yaml"
    assert text == expected.read_text(), f"python -m jobs plan jobs/recipes/{name}.yaml --resolved > {expected}"


def test_a_value_of_another_stage_is_described_before_and_after_it_is_known(tmp_path):
    loaded = load_chooser(tmp_path)
    assert describe_value(loaded, loaded.stage("user"), "rate") == "one of (0.5, 0.25), known after chooser"
    finish_chooser(loaded, rate=0.25)
    after = with_values(loaded)
    assert describe_value(after, after.stage("user"), "rate") == "0.25, one of (0.5, 0.25) (chooser)"
