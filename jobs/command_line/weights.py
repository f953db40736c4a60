"""`patchline import|export|analyze|evaluate`: weights in, out, looked at, and judged.

patchline evaluate runs/digits/finetune-1a2b3c4d shards/test --protocol top-1 --protocol per-class
patchline evaluate vit_b16.npz shards/test train=shards/train --protocol knn --protocol fewshot knn.k=[20]

How `evaluate` does without a recipe:
1. The words become a campaign of one stage, `evaluate` (jobs/stages/evaluate.py), in a run directory of its own.
2. It is run as `run` does: the same words again are answered from the document; a set or protocol more costs only that.
3. The document is copied to the output folder, and its table is printed.
"""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from data.errors import DataError, UsageError
from jobs.command_line.words import Debug, make_group
from jobs.named_stages import CHECKPOINTS, find_set, find_stage, near_path
from jobs.terminal import echo
from models.checks import did_you_mean
from models.weights.folder import CONFIG, THEIR_WEIGHTS
from pipeline.values import counted

STAGE = "evaluate"
MOST_PROCESSES = 8  # on a machine without GPUs: each holds the whole model

ForeignPath = Annotated[
    str, typer.Argument(help="An official .npz; a folder or .safetensors file of ours, timm or transformers.")
]
NewFolder = Annotated[
    str, typer.Argument(help="Where weights.safetensors and model.json go: what a recipe's init: names.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What the file cannot tell, as heads=3.")
]
ClassList = Annotated[
    str | None,
    typer.Option("--names", metavar="FILE", help="Class names, one a line; else those that the file has."),
]
OurFolder = Annotated[
    str, typer.Argument(metavar="WEIGHTS", help="Our weights: RUN/STAGE, a stage's folder, or what `import` wrote.")
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="The file (npz) or folder to write.")]
Format = Annotated[Literal["safetensors", "npz", "timm", "hf"], typer.Option(help="Whose format.")]
Preprocess = Annotated[
    str | None,
    typer.Option(
        metavar="OPS",
        help="Evaluation ops that timm and hf are told of, as 'resize(224)'; else those recorded with the weights.",
    ),
]
AnyWeights = Annotated[
    str, typer.Argument(metavar="WEIGHTS", help="RUN/STAGE, a folder of weights, or a file that `import` takes.")
]
Images = Annotated[list[str], typer.Argument(help="Image files, folders of them, or tar shards.")]
Output = Annotated[str, typer.Option(metavar="DIR", help="Where the pictures and numbers go.")]
Limit = Annotated[
    int, typer.Option(min=1, help="At most so many, of files evenly over their names; the paper takes 128.")
]
SetsAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="SET… [KEY=VALUE…]", help="Indexes to judge on; train=INDEX; knn.k=[20], cluster.workers=4."
    ),
]
ProtocolNames = Annotated[
    list[str] | None,
    typer.Option("--protocol", help="top-1, top-5, real, per-class, fewshot, linear, knn, logistic; several times."),
]
DocumentFolder = Annotated[
    str | None, typer.Option(metavar="DIR", help="Where evaluation.json goes; else runs/evaluate-<weights>.")
]

commands = make_group()


@commands.command("import")
def import_foreign(
    path: ForeignPath,
    directory: NewFolder,
    overrides: Overrides = None,
    names: ClassList = None,
    _debug: Debug = False,
) -> None:
    """Write official, timm or transformers weights as ours."""
    refuse_missing(path)
    from jobs.commands.weights import import_weights

    import_weights(path, directory, overrides=overrides or [], class_list=names)


@commands.command()
def export(
    directory: OurFolder, path: Target, format: Format, preprocess: Preprocess = None, _debug: Debug = False
) -> None:
    """Write our weights as official, timm or transformers ones."""
    directory = find_weights(directory)
    if preprocess is not None:
        from pipeline.evaluation.protocols import check_ops

        check_ops(preprocess)
    from jobs.commands.weights import export_weights

    export_weights(directory, path, format, preprocess)


@commands.command()
def analyze(weights: AnyWeights, images: Images, output: Output, limit: Limit = 128, _debug: Debug = False) -> None:
    """Draw what a ViT looks at: the paper's figures 6, 7 and 11."""
    weights = find_weights(weights)
    missing = [path for path in images if not Path(path).exists()]
    if missing:
        raise UsageError(
            f"there is no file or folder {', '.join(missing)}{near_path(missing[0])}\n"
            "  expected image files, folders of them or tar shards"
        )
    if Path(output).is_file():
        raise UsageError(f"--output {output} is a file\n  expected a folder, which is made where there is none")
    from data.index.tar import IMAGES

    # Of a path without an image it is told before torch is imported.
    images_or_tars = tuple(f".{suffix}" for suffix in (*IMAGES, "tar"))
    has_images = False
    for path in map(Path, images):
        for file in itertools.chain([path], path.rglob("*.*")):
            if file.name.lower().endswith(images_or_tars):
                has_images = True
                break
    if not has_images:
        raise UsageError(
            f"no images in {', '.join(images)}\n"
            f"  expected image files ({', '.join(IMAGES)}), folders of them or tar shards"
        )
    from jobs.extras.analyze import analyze

    analyze.analyze(weights, images, output, limit)


@commands.command()
def evaluate(
    weights: AnyWeights,
    words: SetsAndOverrides,
    protocol: ProtocolNames = None,
    output: DocumentFolder = None,
    _debug: Debug = False,
) -> None:
    """Judge weights on sets: accuracies with intervals, and a document of what they trace back to."""
    if all("=" in word for word in words):
        raise UsageError(
            "no set to evaluate on\n  give indexes, or their folders, for example: python -m jobs evaluate "
            f"{weights} runs/photos/parts/held-out"
        )
    weights = find_weights(weights)
    from data.files import write_whole
    from jobs.cluster_config import ClusterConfig, cores
    from jobs.recipe.campaign import resolve
    from jobs.recipe.validate import refuse
    from jobs.resolved_recipe import INPUTS, CheckResult
    from jobs.run.session import run_campaign
    from pipeline import config
    from pipeline.evaluation.document import NAME
    from pipeline.evaluation.protocols import PROTOCOLS

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
        sets[name] = {"test": find_set(word)}
    folder = output or f"runs/evaluate-{name_of(weights)}"
    section: dict[str, Any] = {"init": weights, "sets": sets}
    for word in protocol or ():
        if word not in PROTOCOLS:
            raise UsageError(f"--protocol {word}: no such protocol{did_you_mean(word, PROTOCOLS)}")
    if protocol:
        section["protocols"] = protocol
    values: dict[str, Any] = {"run": folder, STAGE: section}
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
    # What is missing or misspelt does not wait for torch, which alone can count GPUs.
    campaign = resolve(config.Recipe(values, "the command", folder))
    stage = campaign.stage(STAGE)
    refuse(CheckResult.of(DataError(message), INPUTS) for message in stage.missing)
    import torch

    # Workers are processes of this machine, as many as it has GPUs, or cores; Ray's where a cluster is to be joined.
    gpus = torch.cuda.device_count()
    cluster: dict[str, Any] = {"workers": gpus or min(cores(), MOST_PROCESSES)}
    if gpus:
        cluster["gpus_per_worker"] = 1
    if "RAY_ADDRESS" not in os.environ:
        cluster["backend"] = "processes"
    cluster |= values.get("cluster", {})
    run_campaign(replace(campaign, cluster=config.build(ClusterConfig, cluster, "cluster")))
    document = (campaign.directory(stage) / NAME).read_text()
    write_whole(campaign.run / NAME, document)
    echo(f"written  {campaign.run / NAME}: {counted(len(json.loads(document)['results']), 'result')}")


def name_of(path: str) -> str:
    """Return a name for what is at a path, of letters, digits, dashes and underscores."""
    from data.index.document import SUFFIX

    last = path.rstrip("/").rpartition("/")[2] or "weights"
    stem = last.removesuffix(SUFFIX).removesuffix(".npz").removesuffix(".safetensors")
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem)


def find_weights(path: str) -> str:
    """Return the folder or file of weights that a path means; those in a store are fetched. Raises DataError."""
    if "://" in path:
        from jobs.commands.stored_runs import fetch_weights

        return fetch_weights(path)
    path = find_set(find_stage(path))  # a set by its name is refused as one
    refuse_missing(path)
    return path


def refuse_missing(path: str) -> None:
    """Raise DataError where no weights are at the path; `file.npz:img` names a part of a file (big_vision)."""
    if not Path(path).exists() and not Path(path.rpartition(":")[0] or path).exists():
        raise DataError(
            f"there is no file or folder {path}{near_path(path)}\n"
            "  expected an official .npz, or a folder or .safetensors file of ours, timm or transformers"
        )
    folder = Path(path)
    if folder.is_file() and ".npz" not in folder.name and folder.suffix != ".safetensors":
        raise DataError(
            f"cannot load {path}: it is no weights\n"
            "  expected an official .npz, or a folder or .safetensors file of ours, timm or transformers\n"
            "  pickled checkpoints (.pth, .bin) are not opened: convert them to safetensors first"
        )
    if folder.is_dir() and not (folder / CONFIG).exists() and not (folder / THEIR_WEIGHTS).exists():
        if (folder / CHECKPOINTS).is_dir():
            raise DataError(
                f"{path} has checkpoints, and no weights yet\n"
                f"  type python -m jobs checkpoints export {path} --to FOLDER, then name FOLDER"
            )
        from data.index.document import SUFFIX

        if any(folder.glob(f"*{SUFFIX}")):
            raise DataError(f"{path} is a set, expected weights first and sets behind them\n  type them in that order")
        raise DataError(
            f"cannot load {path}: it is no folder with {CONFIG} or {THEIR_WEIGHTS}\n"
            "  pickled checkpoints (.pth, .bin) are not opened: convert them to safetensors first"
        )
