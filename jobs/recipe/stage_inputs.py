"""What a stage reads: does it fit the field that names it, what is its digest, which model are its weights of.

pretrain: {data: {train: "@shards/train"}}     a set of the pack stage `shards`: `check_part`
finetune: {init: weights/b16}                  a folder from outside the campaign: `content_digest`, `source_model`
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
from data.errors import ConfigError, DataError
from data.index.document import load_index
from jobs.context import reference
from jobs.resolved_recipe import Stage
from jobs.stages import any_weights, pack
from models.checks import did_you_mean
from models.weights.files import CONFIG
from pipeline import artifacts
from pipeline.config import require
from pipeline.training_config import model_config, trained_model

MAKE_WEIGHTS = ("pretrain", "resize", "finetune")  # kinds that `init` may name
MISSING = "missing"  # stands for the digest of an input that cannot be read


Digests = dict[tuple[Callable[[str], str], str], str]  # by how an input was read, and its path


def content_digest(name: str, kind: str, field: str, path: str, missing: list[str], digests: Digests) -> str:
    """Return the digest of an input from outside the campaign: an index's own, or the sha256 of weights or of a list.

    What does not exist, or is not what its maker wrote, is noted in `missing`, which readiness.check_inputs refuses.
    `digests` remembers the others: the runs of a sweep start from the same weights, which are read once for all.
    """
    read = digest_of_index
    if field.endswith(pack.LISTS) or field == "leaks":
        read = digest_of_file
    elif field == "init":
        read = digest_of_any_weights if kind == "evaluate" else digest_of_weights
    try:
        if (read, path) not in digests:
            digests[read, path] = read(path)
        return digests[read, path]
    except DataError as error:
        missing.append(f"{name}.{field}: {error}")
    except OSError as error:
        expected = "a folder that holds the weights, or @stage" if field == "init" else "a file that is there"
        missing.append(f"{name}.{field}: cannot be read: {error}\n  give {expected}")
    return MISSING


def digest_of_index(path: str) -> str:
    """Return the digest that an index says itself."""
    return load_index(path).digest


def digest_of_file(path: str) -> str:
    """Return the sha256 of a list of samples, or of a leaks.json."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def digest_of_weights(path: str) -> str:
    """Return the sha256 of weights of ours, which are compared with what their stage wrote down."""
    return artifacts.check_weights(Path(path), say=not_now).sha256


def digest_of_any_weights(path: str) -> str:
    """Return the sha256 of weights of any kind."""
    return any_weights.digest_of(path, say=not_now)


def not_now(text: str) -> None:
    """Leave a line unsaid: a stage says it when it starts from these weights; reading a recipe prints nothing."""


def check_part(field: str, value: str, part: str, parent: Stage) -> None:
    """Raise ConfigError unless the parent stage makes what the field wants: sets of data, or weights for `init`."""
    if field.endswith(".stage"):  # of a sweep's table, whose runs are stages of any kind
        return
    if field.endswith(".init"):
        if parent.kind == "sweep":
            runs = ", ".join(f"@{run}" for run in parent.config.runs)
            raise ConfigError(f"{field} is {value}: that is the table of a sweep\n  expected one of its runs: {runs}")
        require(
            parent.kind in MAKE_WEIGHTS and not part,
            f"{field} is {value}: that is no weights\n"
            f"  expected @stage, of one of the kinds {', '.join(MAKE_WEIGHTS)}, or a folder of weights",
        )
        return
    require(
        parent.kind == "pack",
        f"{field} is {value}: a {parent.kind} stage makes no data\n"
        "  expected @stage/set of a pack stage, or the path of an index",
    )
    sets = parent.config.sets
    require(
        part in sets,
        f"{field} is {value}: {parent.name} packs no set {part!r}{did_you_mean(part, sets)}\n"
        f"  expected one of its sets: {', '.join(f'@{parent.name}/{name}' for name in sets)}",
    )


def model_of_stage(name: str, kind: str, stage_config: Any, earlier: Mapping[str, Stage], missing: list[str]) -> Any:
    """Return the architecture that a stage ends with: that of its recipe, or of its weights with what it changes.

    It is None for pack and for the table of a sweep, and where the weights that the stage starts from do not exist yet;
    where they do, and tell nothing of their model, that is noted in `missing`.
    """
    if kind in ("pack", "sweep"):
        return None
    source = None
    if stage_config.init is not None:
        if kind == "evaluate" and any_weights.is_foreign(stage_config.init):
            return any_weights.load(stage_config.init, stage_config.model).config
        source = source_model(stage_config.init, earlier)
        if source is None:
            if reference(stage_config.init) is None:
                missing.append(
                    f"{name}.init: no {CONFIG} in {stage_config.init}, which tells the model of the weights\n"
                    "  give a folder as a stage or `python -m jobs import` writes it, or @stage"
                )
            return None
    try:
        if kind in ("fewshot", "evaluate"):
            return source
        if kind == "resize":
            return model_config({"image_size": stage_config.image_size}, source)
        return trained_model(stage_config, source)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None


def source_model(init: str, earlier: Mapping[str, Stage]) -> Any:
    """Return the architecture of the weights that `init` names; None where they are missing (see `Stage.missing`)."""
    link = reference(init)
    if link is not None:
        parent_name, _ = link
        return earlier[parent_name].model
    path = Path(init) / CONFIG
    if not path.is_file():
        return None
    try:
        return models.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # weights without digests may hold anything
        raise DataError(f"{path} is torn or altered: {error}\n  bring it back from a copy, or import again") from None
