"""What `plan` and `run` ask of a campaign before any stage starts; what would be refused later is refused now.

Of stages that have not finished:
1. `check_inputs`: what they read from outside the campaign is there;
2. `check_unfinished`: none is half done with another config, and their sets can be used; shards that were packed are
   there still;
3. `check_memory`: they fit the memory that their recipe allows.

Of stages that have: `check_finished`, that what they handed on is what they wrote.

Data that an earlier stage makes may not be there yet: `stage_run.run_stage` looks at it when the stage is about to
start.
"""

from collections.abc import Callable, Sequence

from data.errors import ConfigError, DataError
from jobs.context import index_if_made, reference
from jobs.recipe.changes import changes_since_half_done
from jobs.resolved_recipe import Campaign, Stage
from jobs.stages import evaluate, evaluation_config, fewshot, pack, training
from jobs.worlds import allowed_worlds
from pipeline import artifacts
from pipeline.plan.memory import GIB, BudgetTooSmall, blocks_of, with_blocks
from pipeline.plan.memory_remedies import check_fits, smaller_micro_batches
from pipeline.plan.memory_traces import TraceFailed
from pipeline.training_config import TrainConfig


def check_inputs(campaign: Campaign, stages: Sequence[Stage]) -> None:
    """Raise DataError, which names all of them, where inputs of unfinished stages from outside are missing."""
    messages = missing_inputs(campaign, stages)
    if len(messages) > 1:
        # On one line with the first, because status.json keeps one line.
        messages[0] = f"{len(messages)} inputs are missing: {messages[0]}"
    if messages:
        raise DataError("\n  ".join(messages))


def missing_inputs(campaign: Campaign, stages: Sequence[Stage]) -> list[str]:
    """Return a message for each input from outside the campaign that an unfinished stage reads and that is missing."""
    messages: list[str] = []
    for stage in stages:
        # A finished stage is skipped: what it was made from may be gone.
        if campaign.done(stage) is None:
            messages += stage.missing
    return messages


def check_unfinished(campaign: Campaign, stages: Sequence[Stage], *, fresh: bool) -> None:
    """Raise ConfigError or DataError where one of these stages would be refused when its turn comes.

    Data that an earlier stage makes may not be there yet; it is looked at when the stage is about to start; what one
    has made must be there still. Half-done stages with another config are refused unless `fresh`.
    """
    if not fresh:
        check_unchanged(campaign, stages)
    for stage in stages:
        if campaign.done(stage) is not None:
            continue
        if isinstance(stage.config, TrainConfig):
            training.check_sets(stage.config, stage.name, campaign.resolve, index_if_made)
        if isinstance(stage.config, fewshot.Config):
            fewshot.check_sets(stage.config, campaign.resolve, index_if_made)
        if isinstance(stage.config, evaluate.Config):
            evaluation_config.check_sets(stage.config, campaign.resolve, index_if_made)
    # Last, because the checks above tell of a lost shard how to train without it.
    check_packed(campaign, stages)


def check_unchanged(campaign: Campaign, stages: Sequence[Stage]) -> None:
    """Raise ConfigError where one of these stages is half done with another config."""
    for stage in stages:
        changes = changes_since_half_done(campaign, stage)
        if changes:
            raise ConfigError(
                f"{stage.name} is half done with another config:\n    " + "\n    ".join(changes) + "\n"
                "  undo the change to resume it, or pass --fresh to start this stage over (the old one is kept)"
            )


def check_packed(campaign: Campaign, stages: Sequence[Stage]) -> None:
    """Raise DataError where shards of a finished pack stage are gone: of one among these stages, or read by one."""
    names = set()
    dropped: list[str] = []
    for stage in stages:
        names.add(stage.name)
        if isinstance(stage.config, TrainConfig):
            dropped += stage.config.data.drop
        for value in stage.parents.values():
            link = reference(value)
            if link is not None:
                names.add(link[0])
    for stage in campaign.stages:
        outcome = campaign.done(stage)
        if stage.kind == "pack" and stage.name in names and outcome is not None:
            pack.check_packed(campaign.directory(stage), outcome["sets"], dropped)


def check_finished(campaign: Campaign, stages: Sequence[Stage], say: Callable[[str], None]) -> None:
    """Raise DataError where a file that a finished stage handed on has changed since.

    `say` is told of a check that took long.
    """
    for stage in stages:
        if campaign.done(stage) is not None:
            artifacts.check_files(campaign.directory(stage), say)


def check_memory(campaign: Campaign, stages: Sequence[Stage], say: Callable[[str], None]) -> None:
    """Raise ConfigError, with what to change, where a stage to be trained does not fit `activation_gb` or
    `cluster.gpu_memory_gb`, or where how many blocks the first comes to cannot be told.

    Without these fields nothing is traced, which takes some seconds for a step that never was. What the second needs
    and cannot be traced is said, and goes on unchecked.
    """
    limit = campaign.cluster.gpu_memory_gb
    is_gpu = campaign.cluster.gpus_per_worker > 0
    for stage in stages:
        if campaign.done(stage) is not None or not isinstance(stage.config, TrainConfig) or stage.model is None:
            continue
        # What a worker needs is the most where the workers are the fewest.
        fewest = allowed_worlds(stage.config, campaign.cluster)[-1]
        has_whole_images = stage.config.thinning.has_whole_images
        if stage.config.activation_gb is not None:
            if not has_whole_images:
                say(
                    f"{stage.name}: activation_gb is counted on whole images, of which patch dropout leaves out a "
                    f"part: fewer blocks may be enough; {number_in_its_place(stage)}"
                )
            check_activation_budget(stage, stage.config, fewest, is_gpu=is_gpu)
        if limit is None or not is_gpu:
            continue
        # What is traced is of whole images, and nobody has traced fewer patches: this limit refuses nothing for them.
        if not has_whole_images:
            say(f"{stage.name}: whether it fits cluster.gpu_memory_gb={limit:g} is not known with patch dropout")
            continue
        try:
            check_fits(stage.config, stage.model, fewest, int(limit * GIB), is_gpu=True, name=stage.name)
        except TraceFailed as error:
            say(f"{stage.name}: whether it fits cluster.gpu_memory_gb={limit:g} is not known: {error}")


def check_activation_budget(stage: Stage, cfg: TrainConfig, world: int, *, is_gpu: bool) -> None:
    """Raise ConfigError where nobody can tell how many blocks `activation_gb` recomputes, or none are enough."""
    try:
        with_blocks(cfg, stage.model, is_gpu=is_gpu)
    except BudgetTooSmall as error:
        way_out = f"type a larger {stage.name}.activation_gb"
        for micro_batch in smaller_micro_batches(cfg, world):
            if micro_batch <= error.largest:
                way_out = f"type {stage.name}.micro_batch={micro_batch}, or a larger {stage.name}.activation_gb"
                break
        raise ConfigError(f"{stage.name}.{error}\n  {way_out}") from None
    except TraceFailed as error:
        # To guess would end the run out of memory hours later, or take a third more time without a word.
        raise ConfigError(
            f"{stage.name}.activation_gb={cfg.activation_gb:g}: how many blocks to recompute is not known: {error}\n"
            f"  {number_in_its_place(stage)}"
        ) from None


def number_in_its_place(stage: Stage) -> str:
    """Say what to type where a number of blocks is to stand in the place of `activation_gb`."""
    return (
        f"type the number in its place: {stage.name}.activation_gb=null {stage.name}.checkpoint_blocks=N, from 0 to "
        f"{blocks_of(stage.model)}, with which a worker needs the least memory"
    )
