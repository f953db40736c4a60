"""Explain mistyped overrides: an option instead of a key, or a stage that only overrides define.

run photos.yaml --batch-size 128
    write recipe keys without dashes: pretrain.batch_size=128
plan vit_l16_i21k finetune.model.image_size=384       # its stages are pretrain, finetune-imagenet, …
    the recipe has no stage finetune, so finetune.model.image_size=384 would add one
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.errors import ConfigError
from jobs.recipe.campaign import NOT_STAGES
from jobs.resolved_recipe import Kinds
from pipeline.config import find_key
from pipeline.recipe import read_recipe
from pipeline.training_config import TrainConfig


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


def key_meant(option: str, words: Sequence[str]) -> str:
    """Return the override that an option such as "--batch-size 128" probably means: "pretrain.batch_size=128"."""
    key = find_key(option.lstrip("-").replace("-", "_"), TrainConfig)
    if key is None:
        return "pretrain.optim.lr=1e-3"
    value = "…"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith(f"{option}="):
            value = word.partition("=")[2]
        elif word == option and following and not following.startswith("-"):
            value = following
    return f"pretrain.{key}={value}"
