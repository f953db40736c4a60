"""Compute a stage's key: a digest of its settings and inputs.

    pretrain: {data: {train: "@shards/train"}}     contains the key of `shards`, the stage that writes this input
    finetune: {init: weights/b16}                  contains the sha256 of these weights, from outside the campaign

The key of a stage identifies its output before the output exists, so `plan` knows all keys before a run.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import models
from data.errors import ConfigError, DataError
from data.images.augment import RESIZE_BEFORE_RANDOM_CROP
from data.images.preprocess import corrections
from data.index.document import load_index
from jobs.resolved_recipe import OF_WEIGHTS, Kinds, MissingInput, Reads, Stage, reference
from jobs.stage_folders import TABLE
from models import ModelConfig
from models.checks import did_you_mean
from models.weights.folder import CONFIG
from pipeline import artifacts, config
from pipeline.evaluation import any_weights

SCHEMA = 1  # version of the outputs of stages; increasing it makes every stage run again
MISSING = "missing"  # used instead of the digest of an input that cannot be read


def resolve(stage: Stage, earlier: Mapping[str, Stage], digests: dict[tuple[Reads, str], str], kinds: Kinds) -> Stage:
    """Return a parsed stage with its inputs, model and key filled in; `earlier` contains its parent stages.

    `digests` caches the digests of inputs from outside the campaign, because all runs of a sweep may start from the
    same weights.
    """
    # 1. A digest for the content of each input.
    missing: list[MissingInput] = []
    keys: dict[str, str] = {}
    links = stage.links
    for field_name, reads in stage.reads.items():
        value = stage.parents[field_name]
        if field_name in links:
            parent_name, part = links[field_name]
            parent = earlier[parent_name]
            check_part(f"{stage.name}.{field_name}", value, reads, parent, part, kinds)
            keys[field_name] = f"{parent.key}/{part}"
            continue
        if value == "???":
            raise ConfigError(f"{stage.name}.{field_name} is missing\n  expected a path, or @stage")
        try:
            if (reads, value) not in digests:
                digests[reads, value] = digest_of(reads, value)
            keys[field_name] = digests[reads, value]
        # The input does not exist, or its content differs from its recorded digest.
        except (DataError, OSError) as error:
            keys[field_name] = MISSING
            text = str(error)
            if isinstance(error, OSError):
                expected = "an existing file"
                if reads in OF_WEIGHTS:
                    expected = "a folder with weights, or @stage"
                text = f"cannot be read: {error}\n  expected {expected}"
            missing.append(MissingInput.at(stage.name, field_name, reads, value, text))

    # 2. The model, unless the initial weights are missing or damaged.
    if keys.get("init") != MISSING:
        stage = with_model(stage, earlier)

    # 3. The inputs in the key: those that must not change on resume. A test set may change before a resume, so it is
    # tagged "warn". For a value determined by another stage, the key contains that stage's key and the placeholder.
    forbidden = config.tagged(stage.config, "forbid")
    inputs_in_key: dict[str, str] = {}
    eval_inputs: dict[str, str] = {}
    for name, key in keys.items():
        # A field of named paths, such as a figure's `tables`, is tagged as a whole.
        if name in forbidden or name.rpartition(".")[0] in forbidden:
            inputs_in_key[name] = key
        else:
            eval_inputs[name] = key
    for name in stage.references:
        parent_name, part = links[name]
        inputs_in_key[name] = f"{earlier[parent_name].key}/{part}"
    # Evaluation settings are in the key in two cases: for runs of a sweep, because their results are compared, and for
    # stages with keep_best, because evaluations select the exported weights.
    warned: dict[str, object] = {}
    selects_weights = getattr(stage.config, "keep_best", None) is not None
    if stage.is_run or selects_weights:
        warned = config.tagged(stage.config, "warn")
    for name, warned_value in warned.items():
        is_evaluation_field = name in ("data.evaluate", "data.preprocess") or name.startswith("probe.")
        if is_evaluation_field or (selects_weights and name == "evaluate_every"):
            inputs_in_key[name] = keys.get(name, str(warned_value))

    # 4. The key. It contains the digests of inputs instead of their paths, so moving the data does not change it.
    values = dict(forbidden)
    for name in (*keys, *stage.kind.inputs):
        values.pop(name, None)
        values.pop(name.rpartition(".")[0], None)
    identity: dict[str, object] = {
        "schema": SCHEMA,
        "kind": stage.kind.name,
        "config": values,
        "inputs": inputs_in_key,
    }
    # Add bug fixes that affect the stage's preprocessing. If there are none, the key stays the same.
    corrected: dict[str, int] = {}
    for field_name, field_value in (forbidden | warned).items():
        if field_name.endswith("augment.crop") and field_value == "random":
            corrected |= corrections(RESIZE_BEFORE_RANDOM_CROP)
        elif field_name.split(".")[-1] == "preprocess" and field_value is not None:
            corrected |= corrections(str(field_value))
    if corrected:
        identity["corrected"] = corrected

    key = config.digest(identity)
    return replace(stage, key=key, inputs=inputs_in_key, eval_inputs=eval_inputs, missing=tuple(missing))


def digest_of(reads: Reads, path: str) -> str:
    """Return the digest of an input. Raises DataError or OSError if it does not exist or was altered."""
    if reads is Reads.TABLE:
        return hashlib.sha256((Path(path) / TABLE).read_bytes()).hexdigest()
    if reads is Reads.FILE:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    # Log nothing while a recipe is read; the check of the weights is logged when the stage starts.
    if reads is Reads.WEIGHTS:
        return artifacts.check_weights(Path(path), log=lambda text: None).sha256
    if reads is Reads.ANY_WEIGHTS:
        digest = any_weights.digest_of(path, log=lambda text: None)
        # By default, weights are evaluated with the preprocessing recorded with them.
        recorded = any_weights.recorded_preprocessing(path)
        return digest if recorded is None else f"{digest} {recorded.ops}"
    return load_index(path).digest


def check_part(field_name: str, value: str, reads: Reads, parent: Stage, part: str, kinds: Kinds) -> None:
    """Raise ConfigError if a field refers to a stage that does not have the required type of output."""
    if reads in OF_WEIGHTS:
        # Users often type the sweep's table instead of one of its runs.
        if parent.kind.reads_outcomes:
            runs = ", ".join(parent.parents.values())
            raise ConfigError(
                f"{field_name} is {value}, the table of a sweep\n  expected one of the sweep's runs: {runs}\n"
                f"  or {value}.* for all of them"
            )
        if not parent.kind.makes_weights or part:
            makers = []
            for kind in kinds.values():
                if kind.makes_weights:
                    makers.append(kind.name)
            raise ConfigError(
                f"{field_name} is {value}, which has no weights\n"
                f"  expected @stage with a stage of kind {', '.join(makers)}, or a folder of weights"
            )
    elif reads not in (Reads.OUTCOME, Reads.TABLE, Reads.FILE):
        sets = parent.kind.sets(parent.config)
        if not sets:
            raise ConfigError(
                f"{field_name} is {value}, but a {parent.kind.name} stage writes no data set\n"
                "  expected @STAGE/SET with a pack stage, or the path of an index"
            )
        if part not in sets:
            references = [f"@{parent.name}/{name}" for name in sets]
            raise ConfigError(
                f"{field_name} is {value}, but {parent.name} has no data set {part!r}{did_you_mean(part, sets)}\n"
                f"  expected one of {', '.join(references)}"
            )


def with_model(stage: Stage, earlier: Mapping[str, Stage]) -> Stage:
    """Return a stage with the architecture of its model, given by the recipe and any initial weights.

    The architecture is None if the stage has no model, or if its initial weights do not exist yet.
    """
    init = getattr(stage.config, "init", None)
    source: ModelConfig | None = None
    if init is not None:
        link = reference(init)
        source = model_at(init) if link is None else earlier[link[0]].model
    try:
        model = stage.kind.model(stage.config, source)
    except ConfigError as error:
        raise ConfigError(f"{stage.name}.{error}") from None
    keeps_head = init is not None and stage.kind.keeps_head(stage.config, source, model)
    return replace(stage, model=model, keeps_head=keeps_head)


def model_at(folder: str) -> ModelConfig | None:
    """Return the architecture of the weights in a folder; None if the folder has no model config.

    Raises DataError if the model config is damaged.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        return None
    try:
        return models.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # possible for weights without digests
        raise DataError(f"{path} is damaged: {error}\n  restore it from a copy, or import the weights again") from None
