"""The work of `patchline evaluate`: judge weights on sets, without a recipe.

patchline evaluate runs/digits/finetune-1a2b3c4d shards/test --protocol top-1 --protocol per-class
patchline evaluate vit_b16.npz shards/test train=shards/train --protocol knn --protocol fewshot knn.k=[20]

1. The words become a campaign of one stage, `evaluate` (jobs/stages/evaluate.py), in a run directory of its own.
2. It is run as `run` does: the same words again are answered from the document; a set or protocol more costs only that.
3. The document is copied to the output folder, and its table is printed.

Without `cluster.…` words the workers are processes of this machine: one a GPU, or without GPUs one a core.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from data.errors import UsageError
from data.files import write_whole
from data.index.document import SUFFIX
from jobs.recipe import campaign
from jobs.run.session import run_campaign
from pipeline import config
from pipeline.evaluation.document import NAME
from pipeline.preflight.machine import cores

STAGE = "evaluate"
MOST_PROCESSES = 8  # on a machine without GPUs: each holds the whole model


def evaluate(weights: str, words: Sequence[str], protocols: Sequence[str], output: str | None) -> None:
    """Judge weights on the sets among the words; the others are `key=value`. Raises what `run` raises."""
    sets = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not sets:
        raise UsageError("no set to judge on\n  give indexes, or their folders: python -m jobs evaluate WEIGHTS SET")
    folder = output or f"runs/evaluate-{name_of(weights)}"
    section: dict[str, Any] = {"init": weights, "sets": named(sets)}
    if protocols:
        section["protocols"] = list(protocols)
    values = {"run": folder, "cluster": local_cluster(), STAGE: section}
    loaded = campaign.resolve(config.Recipe(merged(values, overrides, list(section["sets"])), "the command", folder))
    run_campaign(loaded)
    stage = loaded.stage(STAGE)
    document = (loaded.directory(stage) / NAME).read_text()
    write_whole(loaded.run / NAME, document)
    print(f"written  {loaded.run / NAME}: {len(json.loads(document)['results'])} results", flush=True)


def named(sets: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return {name: {"test": path}} of sets: each is called as its folder or index, numbered where two are alike."""
    by_name: dict[str, dict[str, str]] = {}
    for path in sets:
        base = name_of(path)
        name = base
        number = 2
        while name in by_name:
            name = f"{base}-{number}"
            number += 1
        by_name[name] = {"test": path}
    return by_name


def name_of(path: str) -> str:
    """Return a name for what is at a path, of letters, digits, dashes and underscores."""
    last = path.rstrip("/").rpartition("/")[2] or "weights"
    stem = last.removesuffix(SUFFIX).removesuffix(".npz").removesuffix(".safetensors")
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem)


def local_cluster() -> dict[str, Any]:
    """Return a cluster of as many workers as this machine has GPUs, or cores; of Ray's, where one is to be joined."""
    gpus = torch.cuda.device_count()
    cluster: dict[str, Any] = {"workers": gpus or min(cores(), MOST_PROCESSES)}
    if gpus:
        cluster["gpus_per_worker"] = 1
    if "RAY_ADDRESS" not in os.environ:
        cluster["backend"] = "processes"
    return cluster


def merged(values: dict[str, Any], overrides: Sequence[str], sets: Sequence[str]) -> dict[str, Any]:
    """Return the recipe's values with overrides on top: of `cluster`, of `train` (of all sets), else of the stage."""
    full = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "train":
            full += [f"{STAGE}.sets.{name}.train={value}" for name in sets]
        elif key.split(".")[0] in ("cluster", "trackers"):
            full.append(override)
        else:
            full.append(f"{STAGE}.{override}")
    return config.with_home(config.with_overrides(values, full))
