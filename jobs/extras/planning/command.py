"""`patchline plan|preflight|trial`: what a run needs and takes, before it starts."""

from dataclasses import replace
from typing import Annotated

import typer

from jobs.commands.arguments import Debug, Fresh, Overrides, Recipe
from jobs.commands.campaigns import kinds_of, load_campaign
from jobs.terminal import activity, echo


def plan(
    context: typer.Context,
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
    campaign = load_campaign(recipe, overrides, kinds_of(context))
    if resolved:
        from jobs.extras import recipe_text

        activity.end()
        # YAML ends its last line itself.
        print(recipe_text.resolved(campaign), end="")
        return
    from jobs.extras.planning.run_folders import looked_at
    from jobs.recipe.references import with_values
    from jobs.recipe.validate import refuse, validate_all
    from jobs.resolved_recipe import INPUTS, MEMORY
    from pipeline.extras.plan.cost import Assumptions

    assumed = Assumptions(gpu, price, mtbf)
    with looked_at(campaign.storage) as folder:
        campaign = with_values(replace(campaign, run=folder))
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


def preflight(context: typer.Context, recipe: Recipe, overrides: Overrides = None, _debug: Debug = False) -> int:
    """Measure workers, links, disks and data before a run: a line each, OK, WARN or FAIL, with what to do."""
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
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="This one alone.")] = None,
    _debug: Debug = False,
) -> None:
    """Take 30 real steps of each trained stage on the cluster, and keep what they took for `plan` to go by."""
    campaign = load_campaign(recipe, overrides, kinds_of(context))
    from jobs.extras.planning import trial

    trial.trial(campaign, stage)
