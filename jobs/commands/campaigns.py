"""`patchline run`, and what a recipe's name means to every command that takes one."""

import difflib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.errors import ConfigError
from jobs.commands.arguments import Debug, Fresh, Overrides, Recipe

if TYPE_CHECKING:
    from jobs.resolved_recipe import Campaign, Kinds

RECIPES = Path(__file__).parents[1] / "recipes"

Only = Annotated[
    str | None, typer.Option(metavar="STAGE", help="This stage alone, by its name or kind; its inputs must exist.")
]


def run(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    only: Only = None,
    fresh: Fresh = False,
    _debug: Debug = False,
) -> None:
    """Run a campaign, or resume it with the same command."""
    campaign = load_campaign(recipe, overrides, kinds_of(context))
    # Imported here and not above, as in every command: neither `--help` nor a wrong recipe waits for it.
    from jobs.run.session import run_campaign

    run_campaign(campaign, watchers=context.obj.watchers, fresh=fresh, only=only)


# ------------------------------------------------------------------------------------------------ which recipe


def kinds_of(context: typer.Context) -> "Kinds":
    """Return all kinds of stages that the table of a command names."""
    from jobs.kinds import load_kinds

    return load_kinds(context.obj.kinds)


def load_campaign(recipe: str, overrides: list[str] | None, kinds: "Kinds") -> "Campaign":
    """Return the validated campaign of a recipe with its overrides. Raises ConfigError or DataError."""
    path = recipe_path(recipe)
    from jobs.recipe.campaign import load

    return load(path, overrides or [], kinds)


def recipe_path(recipe: str) -> Path:
    """The file that is named; or a recipe that ships, by its bare name, from any folder.

    Raises ConfigError, with the names of those that ship, where there is neither.
    """
    # A file of the user's comes before a shipped recipe of the same name.
    path = Path(recipe)
    # A submitted job has it in its environment (jobs/recipe/portable.py).
    if path.is_file() or recipe.startswith("env:"):
        return path
    recipes = shipped()
    if recipe not in recipes:
        what_is_there = "a folder, no recipe," if path.is_dir() else "no recipe"
        # Compared without case and ending, which would make two short names alike.
        names = {}
        for name in [*recipes, *(file.name for file in Path.cwd().glob("*.yaml"))]:
            names[name.removesuffix(".yaml").lower()] = name
        own = [name for name in recipes if "/" not in name]
        here = sorted(file.name for file in Path.cwd().glob("*.yaml"))
        way_out = f"recipes that ship: {', '.join(own)}, and those in {RECIPES}"
        if here:
            way_out = f"here: {', '.join(here)}\n  {way_out}"
        close = difflib.get_close_matches(recipe.removesuffix(".yaml").lower(), names, n=1)
        if (path / "status.json").is_file() or list(path.glob("*/stage.json")):
            way_out = f"that is a run: type its recipe; python -m jobs status {recipe} tells how far it is"
        elif path.is_dir():
            way_out = f"a recipe for the images in it is written by python -m jobs new {shlex.quote(recipe)}"
        elif close:
            way_out = f"did you mean {names[close[0]]}?"
        raise ConfigError(f"{what_is_there} at {recipe}\n  {way_out}")
    return recipes[recipe]


def shipped() -> dict[str, Path]:
    """The recipes that ship, by their names below jobs/recipes: digits, transfer/cifar10."""
    recipes = {}
    for file in sorted(RECIPES.rglob("*.yaml")):
        recipes[file.relative_to(RECIPES).with_suffix("").as_posix()] = file
    return recipes
