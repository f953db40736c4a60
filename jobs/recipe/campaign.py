"""A campaign: one recipe, its stages in order, one run directory.

How a recipe becomes a campaign, in order (`load`):
1. the YAML file is read, once a command, and its sections become typed stages, parents first (parse.py);
2. each stage gets its model, and its key: the digest of its "forbid" fields and of its inputs (key.py);
3. what sweeps have chosen already is put into the configs that wait for it (choices.py);
4. each stage is compared with the cluster, and with the indexes that are there already (validate.py).

For example `pretrain: {data: {train: "@shards/train"}}` reads the set `train` that the stage `shards` packs. A stage's
folder is named by its key, `<run>/pretrain-1a2b3c4d`, so an edited recipe never overwrites what another recipe made.
"""

import hashlib
from pathlib import Path

from data.bucket import check_store_url
from data.files import state_folder
from jobs.ownership import check_place
from jobs.recipe import key
from jobs.recipe.choices import resolve_sweep
from jobs.recipe.parse import parse
from jobs.recipe.validate import refuse, validate
from jobs.resolved_recipe import Available, Campaign, Stage
from pipeline.config import Recipe, read_recipe, require


def load(recipe: Path, overrides: list[str]) -> Campaign:
    """Read and validate a recipe. Raises ConfigError or DataError for anything that could not run."""
    return resolve(read_recipe(recipe, overrides))


def resolve(recipe: Recipe) -> Campaign:
    """Return the campaign of a recipe. Raises ConfigError or DataError for anything that could not run."""
    parsed = parse(recipe)
    # Parents first, because a stage's key and its model come from the stages that it reads.
    stages: dict[str, Stage] = {}
    outside = key.Inputs()
    for name, stage in parsed.stages.items():
        stages[name] = key.resolve(stage, stages, outside)

    remote = check_store_url(parsed.run) if "://" in parsed.run else None
    folder = Path(parsed.run).resolve() if remote is None else scratch_folder(remote, parsed.cluster.scratch)
    campaign = Campaign(folder, parsed.cluster, tuple(stages.values()), parsed.trackers, remote)
    check_place(campaign.run)
    for stage in campaign.stages:
        # Of a run in an object store only this machine would have what it packs.
        require(
            remote is None or not stage.kind.sets(stage.config),
            f"{stage.name} is a {stage.kind.name} stage, and run is {remote}: other nodes could not read what it "
            "packs\n"
            "  expected sets that every node can read, such as data.train: indexes/train of shards at s3://…\n"
            "  pack them first, with a run in a folder or `python -m jobs pack`; copy the tars to the store;\n"
            "  then type python -m jobs index s3://BUCKET/SET --output indexes/train (docs/storage.md)",
        )
    campaign = resolve_sweep(campaign)
    # Every stage is checked before the first starts: the last must not be refused when the others have been computed.
    there = Available(campaign, looks_at_files=False)
    for stage in campaign.stages:
        refuse(validate(stage, there))
    return campaign


def scratch_folder(remote: str, base: str) -> Path:
    """Return the local folder of a run in an object store, the same on every node: named by the URL, below `base`."""
    name = f"{Path(remote).name}-{hashlib.sha256(remote.encode()).hexdigest()[:8]}"
    if base:
        return Path(base).expanduser().resolve() / name
    return (state_folder() / "runs" / name).resolve()
