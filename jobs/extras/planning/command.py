"""`patchline plan|preflight|trial`: estimate, check or measure a run before it starts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.checks import few
from data.errors import PatchlineError
from jobs.answer import Answer, Document, report_lines
from jobs.commands.arguments import Debug, Fresh, Overrides, Recipe
from jobs.commands.campaigns import kinds_of, load_campaign
from jobs.extras.data_commands import near_path
from jobs.terminal import activity, echo
from pipeline.values import counted

if TYPE_CHECKING:
    from jobs.resolved_recipe import MissingInput


def plan(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Print the recipe with all defaults and exit.")] = False,
    without_data: Annotated[
        bool,
        typer.Option(
            "--without-data",
            help="Exit with code 0 even if the path of missing data or weights seems to be misspelled.",
        ),
    ] = False,
    fresh: Fresh = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Estimate times for this GPU if there is no trial: h100, h200 or a100."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of a worker-hour, in any currency.")] = None,
    mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Mean time between failures of the run, in hours.")
    ] = None,
    _debug: Debug = False,
) -> Answer:
    """Print a recipe's memory needs, duration, cost and stages; exit with the code that `run` would return.

    Data that do not exist yet are listed and do not change the exit code. Missing weights do, because they decide the
    model.
    """
    campaign = load_campaign(recipe, overrides, kinds_of(context))
    if resolved:
        from jobs.extras import recipe_text

        return Answer({"recipe": recipe_text.resolved(campaign)}, recipe_lines, is_table=True)
    from jobs.extras.planning.run_folders import readable_run
    from jobs.recipe.references import with_values
    from jobs.recipe.validate import refuse, validate_all
    from jobs.resolved_recipe import MEMORY, OF_WEIGHTS, MissingInput
    from pipeline.extras.plan.cost import Assumptions

    assumed = Assumptions(gpu, price, mtbf)
    with readable_run(campaign.storage) as folder:
        campaign = with_values(replace(campaign, run=folder))
        # Make the same checks as `run`, and print no plan for a recipe that `run` would refuse.
        results = validate_all(campaign, campaign.stages, fresh=fresh)
        missing = [result for result in results if isinstance(result, MissingInput)]
        refuse(result for result in results if result not in missing and result.subject != MEMORY)
        # Imported after the checks, because it imports torch, which takes seconds.
        from jobs.extras.planning.plan import plan

        document = plan(campaign, assumed, activity.now, missing)
        lines = document["report"]
        lines += [result.text for result in results if result.level != "FAIL"]
        # Report missing inputs and memory problems last, because most lines of the plan do not depend on them.
        refused = results
        # Data may not exist yet. But a path similar to an existing one is probably misspelled, and one that exists is
        # not what the key expects. Without weights, the model is unknown.
        is_wrong = False
        for entry in missing:
            if entry.reads in OF_WEIGHTS or Path(entry.path).exists() or near_path(entry.path):
                is_wrong = True
        if without_data or not is_wrong:
            refused = [result for result in results if result not in missing]
        try:
            refuse(refused)
        except PatchlineError as error:
            for line in lines:
                echo(line)
            error.details = document
            raise
        if missing:
            lines += ["", *missing_lines(missing)]
        return Answer(document, report_lines)


def missing_lines(missing: "Sequence[MissingInput]") -> list[str]:
    """Return a line for each missing input of a plan, with the recipe keys that name it."""
    keys: dict[str, list[str]] = {}
    for entry in missing:
        keys.setdefault(entry.problem, []).append(f"{entry.stage}.{entry.field}")
    return [
        f"still missing, until then run exits with code 65: {counted(len(keys), 'input')}",
        *(f"  {text} ({few(names)})" for text, names in keys.items()),
    ]


def recipe_lines(document: Document) -> list[str]:
    recipe: str = document["recipe"]
    return recipe.splitlines()


def preflight(context: typer.Context, recipe: Recipe, overrides: Overrides = None, _debug: Debug = False) -> Answer:
    """Measure workers, links, disks and data before a run; report OK, WARN or FAIL, with remedies."""
    campaign = load_campaign(recipe, overrides, kinds_of(context))
    from jobs.cluster.ray import disconnect
    from jobs.extras.planning import preflight

    try:
        return preflight.preflight(campaign)
    finally:
        disconnect()


def trial(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="Measure only this stage.")] = None,
    _debug: Debug = False,
) -> Answer:
    """Run 30 steps of each training stage on the cluster, and save the measured times for `plan`."""
    campaign = load_campaign(recipe, overrides, kinds_of(context))
    from jobs.extras.planning import trial

    return Answer({"trials": trial.trial(campaign, stage)})
