"""Which recipe a word means, and which stage --only means."""

from pathlib import Path

import pytest

from data.errors import ConfigError
from jobs.commands.campaigns import recipe_path, shipped

pytestmark = pytest.mark.quick

RECIPES = Path(__file__).parents[3] / "jobs" / "recipes"


def test_every_recipe_that_ships_has_the_name_of_its_file():
    files = {path.relative_to(RECIPES).as_posix().removesuffix(".yaml") for path in RECIPES.rglob("*.yaml")}
    assert set(shipped()) == files
    assert recipe_path("digits") == RECIPES / "digits.yaml"


def test_a_file_of_the_user_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("run: here")
    assert recipe_path("digits") == Path("digits")


def test_the_recipe_of_a_submitted_job_is_in_its_environment():
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
def test_what_is_no_recipe_is_told_what_to_type(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "status.json").touch()
    with pytest.raises(ConfigError, match=message):
        recipe_path(name)
