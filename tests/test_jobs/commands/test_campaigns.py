"""Find a recipe by file name or built-in name."""

from pathlib import Path

import pytest

from data.errors import ConfigError
from jobs.commands.campaigns import recipe_path, shipped

pytestmark = pytest.mark.quick

RECIPES = Path(__file__).parents[3] / "jobs" / "recipes"


def test_built_in_recipes_are_named_after_their_files():
    files = {path.relative_to(RECIPES).as_posix().removesuffix(".yaml") for path in RECIPES.rglob("*.yaml")}
    assert set(shipped()) == files
    assert recipe_path("digits") == RECIPES / "digits.yaml"


def test_a_users_file_takes_precedence_over_a_built_in_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("run: here")
    assert recipe_path("digits") == Path("digits")


def test_a_submitted_job_reads_its_recipe_from_the_environment():
    assert recipe_path("env:PATCHLINE_RECIPE") == Path("env:PATCHLINE_RECIPE")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digts", "no recipe at digts\n  did you mean digits\\?"),
        ("mine.yml", "no recipe at mine.yml\n  did you mean mine.yaml\\?"),
        ("zzzzzz", "no recipe at zzzzzz\n  recipes in this folder: mine.yaml\n  built-in recipes: .*digits"),
        ("photos", "photos is a folder, not a recipe\n  .* python -m jobs new photos"),
        ("old", "old is a folder, not a recipe\n  it is a run"),
    ],
)
def test_a_missing_recipe_is_an_error_with_a_suggestion(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "status.json").touch()
    with pytest.raises(ConfigError, match=message):
        recipe_path(name)
