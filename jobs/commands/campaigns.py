"""`patchline run`, and the lookup of recipes by path or built-in name, used by all commands."""

import difflib
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.errors import ConfigError
from data.files import state_folder
from data.optional import MissingExtra, load_optional
from jobs.answer import Answer, Document
from jobs.commands.arguments import Debug, Fresh, Overrides, Recipe
from jobs.terminal import typed_recipe

if TYPE_CHECKING:
    from jobs.resolved_recipe import Campaign, Kinds

ADDED_STAGE = "jobs.extras.mistyped_overrides:explain"
RECIPES = Path(__file__).parents[1] / "recipes"

Only = Annotated[
    str | None,
    typer.Option(metavar="STAGE", help="Run only this stage, given by its name or kind; its inputs must exist."),
]


def run(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    only: Only = None,
    fresh: Fresh = False,
    _debug: Debug = False,
) -> Answer:
    """Run all stages of a recipe; to resume, run the same command again."""
    campaign = load_campaign(recipe, overrides, kinds_of(context))
    state_folder()  # raises an error for a user without a home folder before the run folder is created
    # Imported here, as in every command, because Ray would slow down `--help` and errors in the recipe.
    from jobs.run.session import run_campaign

    run_campaign(campaign, watchers=context.obj.watchers, fresh=fresh, only=only)
    return Answer(lambda: run_document(campaign))


def run_document(campaign: "Campaign") -> Document:
    """Return the status of a campaign's run, with the weights and metrics of each stage."""
    from jobs.commands.status import status_document
    from jobs.run.reading import stage_folders

    _, folders = stage_folders(campaign.run)
    return status_document(folders, campaign.storage)


# ------------------------------------------------------------------------------------------------ recipes


def kinds_of(context: typer.Context) -> "Kinds":
    """Load all stage kinds listed in the context's command table."""
    from jobs.kinds import load_kinds

    return load_kinds(context.obj.kinds)


def load_campaign(recipe: str, overrides: list[str] | None, kinds: "Kinds") -> "Campaign":
    """Load a recipe, apply the overrides, and return the validated campaign.

    Raises ConfigError or DataError if the recipe cannot run.
    """
    path = recipe_path(recipe)
    if not recipe.startswith("env:"):
        typed_recipe[:] = [recipe, *(overrides or [])]
    from jobs.recipe.campaign import load

    try:
        return load(path, overrides or [], kinds)
    except ConfigError as error:
        with suppress(MissingExtra):
            raise load_optional(ADDED_STAGE, "")(error, path, overrides or [], kinds) from None
        raise


def recipe_path(recipe: str) -> Path:
    """Return the path of a recipe: a file, or a built-in recipe such as "digits" (from any working directory).

    Raises ConfigError if the recipe does not exist; the message suggests names.
    """
    # A user's file takes precedence over a built-in recipe of the same name.
    path = Path(recipe)
    # "env:NAME": a submitted job reads the recipe from its environment (jobs/extras/submit/portable.py).
    if path.is_file() or recipe.startswith("env:"):
        return path
    if recipe == "-" or path.is_fifo():
        raise ConfigError(
            f"cannot read the recipe from {recipe}, because resuming the run needs the recipe again\n"
            "  save the recipe to a file first: cat > NAME.yaml"
        )
    recipes = shipped()
    if recipe not in recipes:
        # Compare names in lower case and without suffix, because ".yaml" would make any two short names similar.
        names = {}
        for name in [*recipes, *(file.name for file in Path.cwd().glob("*.yaml"))]:
            names[name.removesuffix(".yaml").lower()] = name
        top_level = [name for name in recipes if "/" not in name]
        here = sorted(file.name for file in Path.cwd().glob("*.yaml"))
        hint = f"built-in recipes: {', '.join(top_level)}; more are in the subfolders of {RECIPES}"
        if here:
            hint = f"recipes in this folder: {', '.join(here)}\n  {hint}"
        close = difflib.get_close_matches(recipe.removesuffix(".yaml").lower(), names, n=1)
        if (path / "status.json").is_file() or list(path.glob("*/stage.json")):
            hint = "it is a run directory: use its recipe; for its progress, run python -m jobs status "
            hint += shlex.quote(recipe)
        elif path.is_dir() and path.with_name(f"{path.name}.yaml").is_file():
            hint = f"did you mean {path.with_name(path.name)}.yaml?"
        elif path.is_symlink() and not path.exists():
            hint = f"it is a symbolic link to {path.readlink()}, which does not exist or leads back to the link"
        elif path.is_dir():
            hint = f"to write a recipe for the images in it, run python -m jobs new {shlex.quote(recipe)}"
        elif close:
            hint = f"did you mean {names[close[0]]}?"
        problem = f"{recipe} is a folder, not a recipe" if path.is_dir() else f"no recipe at {recipe}"
        raise ConfigError(f"{problem}\n  {hint}")
    return recipes[recipe]


def shipped() -> dict[str, Path]:
    """Return the files of built-in recipes by name, which is the path without suffix, as in "transfer/cifar10"."""
    recipes = {}
    for file in sorted(RECIPES.rglob("*.yaml")):
        recipes[file.relative_to(RECIPES).with_suffix("").as_posix()] = file
    return recipes
