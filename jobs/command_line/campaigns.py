"""`patchline new|run|plan|trial|preflight|status|report|diff|replay|demo`, and `python -m jobs.pretrain RECIPE`."""

import difflib
import shlex
import webbrowser
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.errors import ConfigError, UsageError
from jobs.command_line.words import WATCHERS, Debug, Fresh, Overrides, Recipe, Run, make_group
from jobs.named_stages import RECORD, find_stage, no_run
from jobs.progress import activity
from jobs.terminal import echo

if TYPE_CHECKING:
    from jobs.resolved_recipe import Campaign

RECIPES = Path(__file__).parents[1] / "recipes"

TrainedStage = Annotated[str, typer.Argument(help="RUN/STAGE, a stage's folder, or a run with one trained stage.")]

commands = make_group()
single_stage = make_group()


def minutes_of(text: str) -> float:
    """Return a time in minutes, which may be written with a unit, as 90s, 2min or 1h."""
    from pipeline.values import SECONDS, read_number

    number = read_number(text, "_s", whole=False)
    if number is None:
        raise typer.BadParameter(f"{text!r} is no time, expected minutes, as 10, or with a unit: 90s, 2min, 1h")
    has_unit = text.strip().endswith(tuple(SECONDS))
    if has_unit:
        number /= 60
    return number


@commands.command()
def run(recipe: Recipe, overrides: Overrides = None, fresh: Fresh = False, _debug: Debug = False) -> None:
    """Run a campaign, or go on with it: the same command resumes."""
    campaign = load_campaign(recipe, overrides)
    # Imported here and not above, as in every command: neither `--help` nor a wrong recipe waits for it.
    from jobs.run.session import run_campaign

    run_campaign(campaign, watchers=WATCHERS, fresh=fresh)


@commands.command()
def new(
    images: Annotated[
        list[str], typer.Argument(help="Class folders, WebDataset tars, parquet, a CSV, or images alone.")
    ],
    model: Annotated[str | None, typer.Option(help="S/16, for one; else what images and machine are good for.")] = None,
    init: Annotated[str | None, typer.Option(metavar="WEIGHTS", help="Fine-tune these instead.")] = None,
    output: Annotated[str | None, typer.Option(metavar="FILE.yaml", help="The recipe; else FOLDER.yaml here.")] = None,
    minutes: Annotated[
        float | None, typer.Option(parser=minutes_of, metavar="MINUTES", help="Time to train; else 10, with a GPU 60.")
    ] = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Overlook labels: masked patch prediction.")] = False,
    _debug: Debug = False,
) -> None:
    """Look at images and write a recipe that trains on them as it is."""
    from jobs.extras.new import new

    new.new(images, model=model, init=init, output=output, minutes=minutes, unlabelled=unlabelled)


@single_stage.command()
def run_stage(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(help="Its name, where the recipe has several of this kind.")] = None,
    fresh: Fresh = False,
    _debug: Debug = False,
) -> None:
    """Run one stage of a recipe alone; what it reads must be there."""
    campaign = load_campaign(recipe, overrides)
    from jobs.run.session import run_campaign

    if stage is None:
        # All runs of a sweep are one section of the recipe, which is run whole.
        names = list(dict.fromkeys(stage.source for stage in campaign.stages if stage.kind.name == context.obj))
        if not names:
            others = ", ".join(dict.fromkeys(stage.source for stage in campaign.stages))
            raise ConfigError(f"the recipe has no stage of kind {context.obj}\n  its stages: {others}")
        if len(names) > 1:
            there = f"{len(names)} stages of kind {context.obj}: {', '.join(names)}"
            raise ConfigError(f"the recipe has {there}; --stage names one")
        stage = names[0]
    run_campaign(campaign, watchers=WATCHERS, fresh=fresh, only=campaign.stage(stage).name)


@commands.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the recipe with every default written out.")
    ] = False,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="Exit 0 although data or weights are missing that `run` would need.")
    ] = False,
    fresh: Fresh = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="h100, h200 or a100: for an estimate where nothing was tried.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of a worker and an hour, in any currency.")] = None,
    mtbf: Annotated[float | None, typer.Option(metavar="HOURS", help="Between two failures of the run.")] = None,
    _debug: Debug = False,
) -> None:
    """Print whether it fits, how long it takes, what it costs, and all stages; exit as `run` would before its first."""
    campaign = load_campaign(recipe, overrides)
    from jobs.recipe import render

    if resolved:
        activity.end()
        # YAML ends its last line itself.
        print(render.resolved(campaign), end="")
        return
    from jobs.recipe.validate import refuse, validate_all
    from jobs.resolved_recipe import INPUTS, MEMORY
    from jobs.run.stale_evaluations import with_new_evaluations
    from jobs.run.sync import looked_at
    from pipeline.extras.plan.cost import Assumptions

    assumed = Assumptions(gpu, price, mtbf)
    with looked_at(campaign.storage) as folder:
        campaign = with_new_evaluations(replace(campaign, run=folder))
        # As `run` does before its first stage: a plan promises nothing that would be refused.
        results = validate_all(campaign, campaign.stages, fresh=fresh)
        refuse(result for result in results if result.subject not in (INPUTS, MEMORY))
        # Only now: torch is imported for what is planned, and a recipe that is refused does not wait for it.
        from jobs.extras.planning.plan import plan

        plan(campaign, assumed, activity.now)
        for result in results:
            if result.level != "FAIL":
                echo(result.text)
        # Missing inputs and memory are refused last: all but a few lines of the plan can be told without them.
        missing = [result for result in results if result.subject == INPUTS]
        if missing and without_data:
            refuse(result for result in results if result not in missing)
            echo("")
            echo(f"planned without {len(missing)} missing inputs: until they are there `run` ends with exit code 65")
        else:
            refuse(results)


@commands.command()
def preflight(recipe: Recipe, overrides: Overrides = None, _debug: Debug = False) -> int:
    """Measure workers, links, disks and data before a run: a line each, OK, WARN or FAIL, with what to do."""
    campaign = load_campaign(recipe, overrides)
    from jobs.cluster.ray import disconnect
    from jobs.extras.planning import preflight

    try:
        return preflight.preflight(campaign)
    finally:
        disconnect()


@commands.command()
def trial(
    recipe: Recipe,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="This one alone.")] = None,
    _debug: Debug = False,
) -> None:
    """Take 30 real steps of each trained stage on the cluster, and keep what they took for `plan` to go by."""
    campaign = load_campaign(recipe, overrides)
    from jobs.extras.planning import trial

    trial.trial(campaign, stage)


@commands.command()
def status(run: Run, _debug: Debug = False) -> None:
    """Show stage, step, loss, speed, ETA and last checkpoint."""
    from jobs.commands import status

    if "://" in run:
        # What reads a store imports torch, for which a run in a folder does not have to wait.
        from jobs.commands import stored_runs

        stored_runs.status(run)
    else:
        status.status(run_or_stage(run))


@commands.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run directories, or folders of single stages.")],
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Of one run report.html in it, of several comparison.html here.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    _debug: Debug = False,
) -> None:
    """Write the page of a run; of several runs, what they do not have in common and where they part."""
    from jobs.commands import stored_runs
    from jobs.extras.report.kept import NAME
    from jobs.extras.report.page import write_report

    with ExitStack() as copies:
        paths = []
        stores = {}
        for run in runs:
            if "://" in run:
                store, stage = copies.enter_context(stored_runs.local_copy(run, with_logs=True))
                paths.append(store.local / stage)
                stores[paths[-1]] = store
            else:
                paths.append(run_or_stage(run))
                if not (paths[-1] / RECORD).exists() and not any(paths[-1].glob(f"*/{RECORD}")):
                    raise no_run(paths[-1])
        page = Path(output or "comparison.html")
        if output is None and len(runs) == 1:
            page = Path(NAME) if "://" in runs[0] else paths[0] / NAME
        if output is not None and (page.is_dir() or not page.parent.is_dir()):
            problem = "it is a folder" if page.is_dir() else f"there is no folder {page.parent}"
            raise UsageError(f"--output {page}: {problem}\n  expected a file's name, as report.html")
        write_report(paths, page, stores)
    echo(f"page: {page}")
    if open_ and not webbrowser.open(page.absolute().as_uri()):
        echo("no browser answers here; open the page where there is one: it needs nothing but itself")


@commands.command()
def diff(
    mine: Annotated[str, typer.Argument(metavar="MINE", help="A recipe, or a run.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="What it should be: table3/vit_i1k, a file, or a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Over OTHER.")] = None,
    _debug: Debug = False,
) -> None:
    """Name what differs in meaning, the most consequential first, with what the paper and its code do."""
    from jobs.extras.diff import diff

    diff.diff(mine, other, overrides or [], load_campaign)


@commands.command()
def replay(
    run: TrainedStage,
    step: Annotated[str, typer.Argument(help="step=N, as the log counts them.")],
    to: Annotated[str | None, typer.Option(metavar="FILE.npz", help="Write images, labels and ids there.")] = None,
    _debug: Debug = False,
) -> None:
    """Rebuild the global batch of one step, as every worker saw it."""
    from jobs.extras.replays.batch import replay

    replay(run, step, to)


@commands.command()
def demo(
    directory: Annotated[str, typer.Option(help="Where its run directory goes.")] = "runs", _debug: Debug = False
) -> int:
    """Run it all on handwritten digits and kill a worker meanwhile."""
    from jobs.extras import demo

    return demo.demo(Path(directory))


# ------------------------------------------------------------------------------------------------ which recipe, stage


def load_campaign(recipe: str, overrides: list[str] | None) -> "Campaign":
    """The validated campaign of a recipe and what comes on top. Raises ConfigError or DataError."""
    path = recipe_path(recipe)
    from jobs.recipe.campaign import load

    return load(path, overrides or [])


def run_or_stage(path: str) -> Path:
    """Return the folder of a run, or of the stage that RUN/STAGE means. Raises DataError."""
    return Path(path if Path(path).exists() else find_stage(path, RECORD)).resolve()


def recipe_path(recipe: str) -> Path:
    """The file that is named; or a recipe that ships, by its bare name, from any folder.

    Raises ConfigError, with the names of those that ship, where there is neither.
    """
    # A file of the user's comes before a shipped recipe of the same name.
    path = Path(recipe)
    # A submitted job has it in its environment (jobs/recipe/render.py).
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
