"""The key of a stage: its inputs, the model of its weights, and the digest of all that it depends on.

    pretrain: {data: {train: "@shards/train"}}     a set of the pack stage `shards`: its key stands for it
    finetune: {init: weights/b16}                  a folder from outside the campaign: the sha256 of its weights

The key of a parent stands for its output, which need not exist yet: so `plan` knows all keys before a run.
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
from jobs.named_stages import TABLE
from jobs.resolved_recipe import Kinds, Reads, Stage, reference
from models import ModelConfig
from models.checks import did_you_mean
from models.weights.folder import CONFIG
from pipeline import artifacts, config
from pipeline.config import require
from pipeline.evaluation import any_weights

SCHEMA = 1  # of a stage's outputs; a bump runs every stage again
MISSING = "missing"  # stands for the digest of an input that cannot be read


def resolve(stage: Stage, earlier: Mapping[str, Stage], digests: dict[tuple[Reads, str], str], kinds: Kinds) -> Stage:
    """Return a parsed stage with its inputs, its model and its key; `earlier` has the stages that it reads.

    `digests` keeps those of inputs from outside the campaign: the runs of a sweep start from the same weights, which
    are read once.
    """
    # 1. A key for what each input holds, by its field.
    missing: list[str] = []
    keys: dict[str, str] = {}
    inputs = stage.kind.inputs_of(stage.config)
    for field_name, (value, reads) in inputs.items():
        link = reference(value)
        if link is not None:
            check_part(f"{stage.name}.{field_name}", value, reads, earlier, kinds)
            parent_name, part = link
            keys[field_name] = f"{earlier[parent_name].key}/{part}"
            continue
        require(value != "???", f"{stage.name}.{field_name} is missing: a path, or @stage")
        try:
            if (reads, value) not in digests:
                # A stage logs the check of its weights when it starts from them; reading a recipe prints nothing.
                if reads is Reads.TABLE:
                    digest = hashlib.sha256((Path(value) / TABLE).read_bytes()).hexdigest()
                elif reads is Reads.FILE:
                    digest = hashlib.sha256(Path(value).read_bytes()).hexdigest()
                elif reads is Reads.WEIGHTS:
                    digest = artifacts.check_weights(Path(value), log=lambda text: None).sha256
                elif reads is Reads.ANY_WEIGHTS:
                    digest = any_weights.digest_of(value, log=lambda text: None)
                    # By default they are evaluated with the preprocessing that lies beside them.
                    recorded = any_weights.recorded_preprocessing(value)
                    if recorded is not None:
                        digest = f"{digest} {recorded.ops}"
                else:
                    digest = load_index(value).digest
                digests[reads, value] = digest
            keys[field_name] = digests[reads, value]
        # It does not exist, or is not what its maker wrote.
        except (DataError, OSError) as error:
            keys[field_name] = MISSING
            text = str(error)
            if isinstance(error, OSError):
                expected = "a file that is there"
                if reads in (Reads.WEIGHTS, Reads.ANY_WEIGHTS):
                    expected = "a folder that holds the weights, or @stage"
                text = f"cannot be read: {error}\n  give {expected}"
            missing.append(f"{stage.name}.{field_name}: {text}")
    for message in stage.kind.missing(stage.config):
        missing.append(f"{stage.name}.{message}")

    # 2. The inputs that the key is of: those that may not change on resume. A test set may change half way: it is
    # tagged otherwise. A value that another stage determines is in the key by that stage's key, and by the placeholder.
    forbidden = config.tagged(stage.config, "forbid")
    inputs_in_key: dict[str, str] = {}
    eval_inputs: dict[str, str] = {}
    for name, key in keys.items():
        if name in forbidden:
            inputs_in_key[name] = key
        else:
            eval_inputs[name] = key
    for name, value in stage.references.items():
        link = reference(value)
        assert link is not None, "only references are kept as such"
        inputs_in_key[name] = f"{earlier[link[0]].key}/{link[1]}"
    # Runs of one section are compared with each other: their key is of how they are evaluated, too. And evaluations
    # choose the weights that a stage with keep_best exports.
    warned: dict[str, object] = {}
    chooses_weights = getattr(stage.config, "keep_best", None) is not None
    if stage.is_run or chooses_weights:
        warned = config.tagged(stage.config, "warn")
    for name, warned_value in warned.items():
        is_judging = name in ("data.evaluate", "data.preprocess") or name.startswith("probe.")
        if is_judging or (chooses_weights and name == "evaluate_every"):
            inputs_in_key[name] = keys.get(name, str(warned_value))

    # 3. The key. Inputs are in it by content and not by path: the same data in another place is the same stage.
    values = dict(forbidden)
    for name in (*keys, *stage.kind.inputs):
        values.pop(name, None)
    identity: dict[str, object] = {
        "schema": SCHEMA,
        "kind": stage.kind.name,
        "config": values,
        "inputs": inputs_in_key,
    }
    # The corrections of the preprocessing that fields ask for. Only where there are any: the keys of all other stages
    # stay what they were.
    corrected: dict[str, int] = {}
    for field_name, field_value in (forbidden | warned).items():
        if field_name.endswith("augment.crop") and field_value == "random":
            corrected |= corrections(RESIZE_BEFORE_RANDOM_CROP)
        elif field_name.split(".")[-1] == "preprocess" and field_value is not None:
            corrected |= corrections(str(field_value))
    if corrected:
        identity["corrected"] = corrected

    parents = {}
    for name, (value, _reads) in inputs.items():
        parents[name] = value
    stage = replace(
        stage,
        parents={**parents, **stage.references},
        key=config.digest(identity),
        inputs=inputs_in_key,
        eval_inputs=eval_inputs,
    )
    # 4. Weights that are missing or have changed tell nothing about the model.
    if keys.get("init") != MISSING:
        stage = replace(stage, model=model_of(stage, earlier, missing))
    return replace(stage, missing=tuple(missing))


def check_part(field_name: str, value: str, reads: Reads, earlier: Mapping[str, Stage], kinds: Kinds) -> None:
    """Raise ConfigError unless the stage that a field names makes what the field reads."""
    link = reference(value)
    assert link is not None, "of references alone"
    parent_name, part = link
    parent = earlier[parent_name]
    if reads in (Reads.WEIGHTS, Reads.ANY_WEIGHTS):
        # The table of a sweep is what people name when they mean one of its runs.
        if parent.kind.reads_outcomes:
            runs = ", ".join(parent.parents.values())
            raise ConfigError(
                f"{field_name} is {value}: that is the table of a sweep\n  expected one of its runs: {runs}\n"
                f"  {value}.* stands for each of them"
            )
        if not parent.kind.makes_weights or part:
            makers = []
            for kind in kinds.values():
                if kind.makes_weights:
                    makers.append(kind.name)
            raise ConfigError(
                f"{field_name} is {value}: that is no weights\n"
                f"  expected @stage, of one of the kinds {', '.join(makers)}, or a folder of weights"
            )
    elif reads not in (Reads.OUTCOME, Reads.TABLE, Reads.FILE):
        sets = parent.kind.sets(parent.config)
        require(
            bool(sets),
            f"{field_name} is {value}: a {parent.kind.name} stage makes no data\n"
            "  expected @stage/set of a pack stage, or the path of an index",
        )
        if part not in sets:
            references = [f"@{parent.name}/{name}" for name in sets]
            raise ConfigError(
                f"{field_name} is {value}: {parent.name} packs no set {part!r}{did_you_mean(part, sets)}\n"
                f"  expected one of its sets: {', '.join(references)}"
            )


def model_of(stage: Stage, earlier: Mapping[str, Stage], missing: list[str]) -> ModelConfig | None:
    """Return the architecture that a stage ends with: that of its recipe, or of its weights with what it changes.

    It is None for a stage without one, and where the weights that the stage starts from do not exist yet; where they
    do, and tell nothing of their model, that is noted in `missing`.
    """

    def source_model(init: str) -> ModelConfig | None:
        link = reference(init)
        if link is not None:
            parent_name, _ = link
            return earlier[parent_name].model
        source = model_at(init)
        if source is None:
            missing.append(
                f"{stage.name}.init: no {CONFIG} in {init}, which tells the model of the weights\n"
                "  give a folder as a stage or `python -m jobs import` writes it, or @stage"
            )
        return source

    try:
        return stage.kind.model(stage.config, source_model)
    except ConfigError as error:
        raise ConfigError(f"{stage.name}.{error}") from None


def model_at(folder: str) -> ModelConfig | None:
    """Return the architecture of the weights in a folder; None where nothing there tells it. Raises DataError."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        return None
    try:
        return models.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # weights without digests may hold anything
        raise DataError(f"{path} is torn or altered: {error}\n  bring it back from a copy, or import again") from None
