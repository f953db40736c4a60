"""Reading a recipe: overrides, interpolations, and what is refused."""

from pathlib import Path

import pytest

from data.errors import ConfigError
from pipeline.recipe import read_recipe, to_yaml, with_overrides

pytestmark = pytest.mark.quick


def test_overrides_reach_into_the_recipe_and_stage_references_need_no_quotes(tmp_path: Path):
    file = tmp_path / "r.yaml"
    file.write_text("a: {b: 1}\n")
    values = read_recipe(file, ["a.b=2", "a.c=@stage/part", "d=[1, 2]"]).values
    assert values == {"a": {"b": 2, "c": "@stage/part"}, "d": [1, 2]}


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n"])
def test_broken_recipe_is_refused(tmp_path: Path, text: str):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_recipe(tmp_path / "r.yaml")


def test_missing_recipe_and_malformed_override_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no recipe at"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a folder\n  expected a recipe, a YAML file"):
        read_recipe(tmp_path)
    with pytest.raises(ConfigError, match="expected key=value"):
        with_overrides({}, ["steps"])


def test_environment_values_stay_unresolved_in_saved_yaml(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATCHLINE_SECRET", "hunter2")
    assert "hunter2" not in to_yaml({"a": "${oc.env:PATCHLINE_SECRET}"})


def test_interpolations_are_resolved_and_missing_ones_reported():
    assert with_overrides({"a": 1, "b": "${a}"}, []) == {"a": 1, "b": 1}
    with pytest.raises(ConfigError, match=r"^Interpolation key 'missing' not found\n  in b$"):
        with_overrides({"b": "${missing}"}, [])


def test_another_model_keeps_only_image_size_and_classes() -> None:
    """A width from the recipe's own model would silently make S/16 another model."""
    recipe = {"pretrain": {"model": {"name": "mu/8", "width": 192, "image_size": 64, "classes": 3}}}
    written_as_text = {"pretrain": {"model": "mu/8"}}
    another = with_overrides(recipe, ["pretrain.model=S/16", "pretrain.model.dropout=0.1"])
    assert another == {"pretrain": {"model": {"name": "S/16", "image_size": 64, "classes": 3, "dropout": 0.1}}}
    both = with_overrides(written_as_text, ["pretrain.model.classes=3"])
    assert both == {"pretrain": {"model": {"name": "mu/8", "classes": 3}}}
    replaced = with_overrides(recipe, ["pretrain.model={name: B/16}"])
    assert replaced == {"pretrain": {"model": {"name": "B/16", "image_size": 64, "classes": 3}}}
    quoted = with_overrides(recipe, ['pretrain.model={"name": B/16, classes: 5}'])
    assert quoted == {"pretrain": {"model": {"name": "B/16", "image_size": 64, "classes": 5}}}
    # Values that only resemble a name: a text that contains one, and a section with one.
    for value in ('{stem: "{name"}', "{stem: [a, name]}", "{inner: {name: x}}"):
        assert with_overrides(recipe, [f"pretrain.model={value}"])["pretrain"]["model"]["width"] == 192, value
    merged = with_overrides(recipe, ["pretrain.model={dropout: 0.1}"])
    assert merged["pretrain"]["model"]["width"] == 192  # a section without a name is merged like any other
