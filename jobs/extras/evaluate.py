"""`patchline evaluate`: evaluate weights on data sets without a recipe.

patchline evaluate runs/digits/finetune-1a2b3c4d shards/test --protocol top-1 --protocol per-class
patchline evaluate vit_b16.npz shards/test train=shards/train --protocol knn --protocol fewshot knn.k=[20]

1. Turn the arguments into a campaign with a single stage, `evaluate` (jobs/stages/evaluate.py), and a separate run
   directory.
2. Run the campaign. If the command is repeated, only new data sets and protocols are evaluated.
3. Copy the results, evaluation.json, to the output folder.
"""

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from data.errors import UsageError
from jobs.answer import Answer, Document
from jobs.commands.arguments import Debug
from jobs.extras.named_weights import AnyWeights, find_weights
from jobs.named_stages import find_set
from models.checks import did_you_mean
from pipeline.values import counted

STAGE = "evaluate"
VALUES = ("value", "low", "high", "samples", "note")  # fields of a value that a script needs
MAX_SET_NAME = 60  # characters; a recipe allows 64, and a number may follow
MAX_PROCESSES = 8  # maximum number of workers on a machine without GPUs; each holds the whole model

SetsAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="SET… [KEY=VALUE…]",
        help="Data sets to evaluate on (an index or its folder), and settings: train=INDEX, knn.k=[20], "
        "cluster.workers=4.",
    ),
]
ProtocolNames = Annotated[
    list[str] | None,
    typer.Option(
        "--protocol",
        help="Protocol to run: top-1, top-5, real, per-class, fewshot, linear, knn or logistic; repeatable.",
    ),
]
DocumentFolder = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder for evaluation.json; default: runs/evaluate-<weights>.")
]


def evaluate(
    context: typer.Context,
    weights: AnyWeights,
    words: SetsAndOverrides,
    protocol: ProtocolNames = None,
    output: DocumentFolder = None,
    _debug: Debug = False,
) -> Answer:
    """Evaluate weights on data sets. Print accuracies with confidence intervals, and write them to evaluation.json."""
    if all(map(is_setting, words)):
        raise UsageError(
            "expected a data set to evaluate on, found none\n"
            "  add the path of an index or its folder, for example: python -m jobs "
            f"evaluate {shlex.quote(weights)} runs/photos/parts/held-out"
        )
    weights = find_weights(weights)
    from data.files import write_atomically
    from jobs.cluster_config import ClusterConfig, cores
    from jobs.kinds import load_kinds
    from jobs.recipe.campaign import resolve
    from jobs.recipe.validate import refuse
    from jobs.run.session import run_campaign
    from pipeline.config import build
    from pipeline.evaluation.document import NAME
    from pipeline.evaluation.protocols import PROTOCOLS
    from pipeline.recipe import Recipe, expand_home, with_overrides

    # Name each data set after its folder or index file; append a number to repeated names.
    sets: dict[str, dict[str, str]] = {}
    overrides: list[str] = []
    for word in words:
        if is_setting(word):
            overrides.append(word)
            continue
        name = set_name_of(word)
        number = 2
        while name in sets:
            name = f"{set_name_of(word)}-{number}"
            number += 1
        sets[name] = {"test": find_set(word)}
    folder = output or f"runs/evaluate-{name_of(weights)}"
    section: dict[str, Any] = {"init": weights, "sets": sets}
    for word in protocol or ():
        if word not in PROTOCOLS:
            raise UsageError(
                f"unknown --protocol {word}{did_you_mean(word, PROTOCOLS)}\n  expected one of {', '.join(PROTOCOLS)}"
            )
    if protocol:
        section["protocols"] = protocol
    values: dict[str, Any] = {"run": folder, STAGE: section}
    # Overrides of `cluster` and `trackers` are top-level keys, `train` applies to all data sets, and all other
    # overrides belong to the stage.
    full: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "train":
            full += [f"{STAGE}.sets.{name}.train={value}" for name in sets]
        elif key.split(".")[0] in ("cluster", "trackers"):
            full.append(override)
        else:
            full.append(f"{STAGE}.{override}")
    values = expand_home(with_overrides(values, full))
    # Report missing files and misspelled keys before the slow import of torch, which is needed only to count GPUs.
    campaign = resolve(Recipe(values, "the command", folder), load_kinds({STAGE: context.obj.kinds[STAGE]}))
    stage = campaign.stage(STAGE)
    refuse(stage.missing)
    import torch

    # One worker process per GPU (or CPU core) of this machine; Ray workers if RAY_ADDRESS names a cluster.
    gpus = torch.cuda.device_count()
    cluster: dict[str, Any] = {"workers": gpus or min(cores(), MAX_PROCESSES)}
    if gpus:
        cluster["gpus_per_worker"] = 1
    if "RAY_ADDRESS" not in os.environ:
        cluster["backend"] = "processes"
    cluster |= values.get("cluster", {})
    campaign = replace(campaign, cluster=build(ClusterConfig, cluster, "cluster"))
    run_campaign(campaign, watchers=context.obj.watchers)
    document = (campaign.directory(stage) / NAME).read_text()
    write_atomically(campaign.run / NAME, document)
    results = []
    for result in json.loads(document)["results"]:
        values = {name: {key: value.get(key) for key in VALUES} for name, value in result["values"].items()}
        results.append({"set": result["set"]["name"], "protocol": result["protocol"]["name"], "values": values})
    return Answer({"evaluation": str(campaign.run / NAME), "weights": weights, "results": results}, result_line)


def result_line(document: Document) -> list[str]:
    return [f"written  {document['evaluation']}: {counted(len(document['results']), 'result')}"]


def is_setting(word: str) -> bool:
    """Return whether a word is KEY=VALUE; the path of a data set may contain "=" too."""
    key, equals, _ = word.partition("=")
    return equals != "" and "/" not in key and not Path(word.partition("/")[0]).exists()


def set_name_of(path: str) -> str:
    """Convert the last part of a path to a name that a recipe allows for a data set (data/checks.py)."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name_of(path))[:MAX_SET_NAME]


def name_of(path: str) -> str:
    """Convert the last part of a path to a name with only letters, digits, dashes and underscores."""
    from data.index.document import SUFFIX

    last = path.rstrip("/").rpartition("/")[2] or "weights"
    stem = last.removesuffix(SUFFIX).removesuffix(".npz").removesuffix(".safetensors")
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem)
