"""A campaign as text: the resolved recipe, as its golden text has it, and as records and people are shown it."""

from jobs.recipe import sweeps
from jobs.recipe.choices import table_of
from jobs.resolved_recipe import Campaign, Stage
from pipeline import config


def resolved(campaign: Campaign) -> str:
    """Return the campaign as YAML with every default written out.

    Of the runs of a sweep the first is written out; of the others, what is different.
    """
    sections: dict[str, object] = {
        "cluster": config.plain(campaign.cluster),
        "trackers": config.plain(campaign.trackers),
    }
    first_runs: dict[tuple[str, str], Stage] = {}  # by the sweep and the kind
    for stage in campaign.stages:
        first = first_runs.setdefault((stage.source, stage.kind.name), stage)
        values = config_as_known(campaign, stage)
        if first is stage or not stage.is_run or stage.kind.name == sweeps.TABLE:
            sections[stage.name] = {"kind": stage.kind.name, **values}
            continue
        before = sweeps.flat(config_as_known(campaign, first), stage.name)
        after = sweeps.flat(values, stage.name)
        changed = {}
        for field in {**before, **after}:
            value = after.get(field, "absent")
            if before.get(field, "absent") != value:
                changed[field] = value
        sections[stage.name] = {"as": first.name, "but": changed}
    return config.to_yaml(sections)


def config_as_known(campaign: Campaign, stage: Stage) -> dict[str, object]:
    """Return a stage's config as nested plain values, with a text for what is still to be chosen."""
    values = config.plain(stage.config)
    for field in stage.chosen:
        if field not in stage.known:
            values = sweeps.with_fields(values, {field: choice_text(campaign, stage, field)}, stage.name)
    return values


def choice_text(campaign: Campaign, stage: Stage, field: str) -> str:
    """Return a chosen field of a stage in words: a value, or the best of several that is not known yet."""
    table = table_of(campaign, stage.chosen[field])
    values = []
    for run in table.config.runs.values():
        value = str(run.values[field])
        if value not in values:
            values.append(value)
    best = f"the best of {', '.join(values)} by {table.config.best}"
    if field in stage.known:
        return f"{stage.known[field]}, {best} ({table.name})"
    return f"{best}, known after {table.name}"
