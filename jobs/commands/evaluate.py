"""The work of `patchline evaluate`: evaluate weights on sets, without a recipe.

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
    """Evaluate weights on the sets among the words; the others are `key=value`. Raises what `run` raises."""
    # Each set is called as its folder or index, numbered where two are alike.
    sets: dict[str, dict[str, str]] = {}
    overrides: list[str] = []
    for word in words:
        if "=" in word:
            overrides.append(word)
            continue
        name = name_of(word)
        number = 2
        while name in sets:
            name = f"{name_of(word)}-{number}"
            number += 1
        sets[name] = {"test": word}
    if not sets:
        raise UsageError("no set to evaluate on\n  give indexes, or their folders: python -m jobs evaluate WEIGHTS SET")
    folder = output or f"runs/evaluate-{name_of(weights)}"
    section: dict[str, Any] = {"init": weights, "sets": sets}
    if protocols:
        section["protocols"] = list(protocols)
    # As many workers as this machine has GPUs, or cores; of Ray's, where one is to be joined.
    gpus = torch.cuda.device_count()
    cluster: dict[str, Any] = {"workers": gpus or min(cores(), MOST_PROCESSES)}
    if gpus:
        cluster["gpus_per_worker"] = 1
    if "RAY_ADDRESS" not in os.environ:
        cluster["backend"] = "processes"
    values: dict[str, Any] = {"run": folder, "cluster": cluster, STAGE: section}
    # Overrides are of `cluster` and `trackers`, of `train` (of all sets), else of the stage.
    full: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "train":
            full += [f"{STAGE}.sets.{name}.train={value}" for name in sets]
        elif key.split(".")[0] in ("cluster", "trackers"):
            full.append(override)
        else:
            full.append(f"{STAGE}.{override}")
    values = config.with_home(config.with_overrides(values, full))
    loaded = campaign.resolve(config.Recipe(values, "the command", folder))
    run_campaign(loaded)
    stage = loaded.stage(STAGE)
    document = (loaded.directory(stage) / NAME).read_text()
    write_whole(loaded.run / NAME, document)
    print(f"written  {loaded.run / NAME}: {len(json.loads(document)['results'])} results", flush=True)


def name_of(path: str) -> str:
    """Return a name for what is at a path, of letters, digits, dashes and underscores."""
    last = path.rstrip("/").rpartition("/")[2] or "weights"
    stem = last.removesuffix(SUFFIX).removesuffix(".npz").removesuffix(".safetensors")
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem)
