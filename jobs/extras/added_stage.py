"""Explain an error in a stage that only overrides define: its name is probably misspelled.

plan vit_l16_i21k finetune.model.image_size=384       whose stages are pretrain, finetune-imagenet, …

the recipe has no stage finetune, so finetune.model.image_size=384 would add one
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.errors import ConfigError
from jobs.recipe.campaign import NOT_STAGES
from jobs.resolved_recipe import Kinds
from pipeline.recipe import read_recipe


def explain(error: ConfigError, path: Path, overrides: Sequence[str], kinds: Kinds) -> ConfigError:
    """Return the error with the recipe's stages, if it concerns a stage that only overrides define; else unchanged.

    A stage with a `kind` was added on purpose.
    """
    try:
        sections = read_recipe(path).values
        added = read_recipe(path, overrides).values
    except ConfigError:
        return error
    names = ", ".join(name for name in sections if name not in NOT_STAGES)
    for override in overrides:
        name = override.partition("=")[0].partition(".")[0]
        section = added.get(name)
        is_added = name not in sections and name not in NOT_STAGES
        if not is_added or not isinstance(section, Mapping) or "kind" in section or name not in str(error):
            continue
        if name not in kinds:
            return ConfigError(f"{error}\n  stages of the recipe: {names}")
        return ConfigError(
            f"the recipe has no stage {name}, so {override} would add one\n"
            f"  stages of the recipe: {names}\n"
            f"  to add a stage, set all its required keys: {error}"
        )
    return error
