"""Implements `patchline new FOLDER`: inspect images and this machine, and write a ready-to-run recipe.

    photos: 600 images of 3 classes (cat 200, dog 200, fox 200), median size 500 × 375 px
    held out: 20% of each class, because no part is named val or test
    wrote photos.yaml: 2,200 steps of 64 images, 293 passes, about 6m40s at 350 images/s on 2 cores
    next: python -m jobs run photos.yaml

1. `data.extras.survey.survey` inspects the images.
2. training.py selects model, length and augmentation. It uses settings known to work at this data size, whose sources
   are named in the recipe's comments, and the training speed of this machine.
3. `write_recipe` renders new.yaml.jinja, which explains each choice in a comment.
"""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.checks import printable
from data.errors import DataError, UsageError
from data.extras.sources.walk import matching
from data.extras.survey.survey import FoundSet, Sets, one_place, survey
from data.files import write_atomically
from data.index.names import preview
from data.index.shard import IMAGES
from jobs.answer import Answer
from jobs.extras.data_commands import near_path
from jobs.extras.named_weights import check_weights_exist
from jobs.extras.progress import ProgressMeter
from jobs.named_stages import find_stage
from jobs.recipe.key import model_at
from jobs.terminal import activity, as_typed, echo
from pipeline.architecture import model_config
from pipeline.artifacts import check_weights, load_weights
from pipeline.evaluation.any_weights import is_foreign
from pipeline.values import amount, counted, duration, flow_yaml

if TYPE_CHECKING:  # imports torch, which takes seconds and would delay an error about a path without images
    from jobs.extras.new.training import Machine, TrainingChoice

MAX_SHARE_OF_BAD = 0.1  # maximum fraction of unreadable images among the opened ones
# How to add classes to images without labels, by their source.
HOW_TO_ADD_CLASSES = {
    "folder": "sort the images into one subfolder per class, and use the folder that contains the subfolders",
    "table": "add a column label to the table",
    "parquet": "add a column label to the parquet file",
    "shards": "add a .cls or .json file with a label next to each image in the tars",
    "index": "index shards whose images have labels",
}


def new(
    places: list[str],
    *,
    model: str | None,
    init: str | None,
    output: str | None,
    minutes: float | None,
    unlabelled: bool,
    probe: bool = False,
    leaf_classes: bool = False,
) -> Answer:
    """Write a recipe for the images at a path, or at several paths expanded from a pattern by the shell.

    Raises DataError if the images or weights cannot be used, ConfigError if the model is unknown, or UsageError if the
    arguments are invalid, for example if the recipe already exists.
    """
    # 1. Check the arguments before the images are counted.
    place = one_place(places)
    if "://" not in place and not all(path.exists() for path in matching(place)):
        raise DataError(
            f"no file or folder at {place}{near_path(place)}\n"
            "  expected a folder of images, tars, a table or parquet files"
        )
    recipe = Path(output or f"{name_of(place)}.yaml")
    if recipe.is_dir():
        example = recipe / f"{name_of(place)}.yaml"
        raise UsageError(f"--output {recipe} is a folder\n  expected a file name, for example {example}")
    if recipe.exists():
        raise UsageError(
            f"{recipe} already exists and will not be overwritten\n  pass --output OTHER.yaml, or delete the file first"
        )
    if not recipe.parent.is_dir():
        raise UsageError(
            f"--output {recipe}: the folder {recipe.parent} does not exist\n  create it, or use another folder"
        )
    if minutes is not None and not 0 < minutes < math.inf:
        raise UsageError(
            f"--minutes is {minutes:g}, expected a finite training time greater than 0\n"
            "  pass --minutes 10, or omit the option"
        )
    if model is not None:
        if init is not None:
            raise UsageError(
                "--model cannot be combined with --init, whose weights determine the model\n  omit --model"
            )
        # This raises ConfigError if the model is unknown.
        model_config({"name": model, "image_size": 224, "classes": 2})
    if leaf_classes and unlabelled:
        raise UsageError("--leaf-classes defines classes, but --unlabelled ignores them\n  omit one of the two")
    if probe and init is None:
        raise UsageError(
            "--probe evaluates the features of pretrained weights, but --init is missing\n  add --init WEIGHTS"
        )
    imported: Path | None = None  # the folder for weights of another library
    if init is not None:
        init = find_stage(init)
        if "://" not in init and not Path(init).exists():
            check_weights_exist(init)
        if is_foreign(init):
            imported = recipe.parent / "weights" / name_of(init)
            if imported.exists():
                raise UsageError(
                    f"--init {init} is in the format of another library, and {imported}, into which it would be "
                    f"imported, already exists\n  use --init {imported}, or remove that folder first"
                )
        elif model_at(init) is None:
            raise DataError(
                f"--init {init} contains no weights\n  expected RUN/STAGE, a folder written by a stage or by python -m "
                "jobs import, for example runs/photos/pretrain-1a2b3c4d, or weights that import reads"
            )
        elif Path(init).is_dir():
            # Read all weights now: damage or NaN must not end the run only after packing.
            check_weights(Path(init), lambda line: None)
            load_weights(Path(init))

    leaf_tables = str(recipe.with_suffix("")) if leaf_classes else None
    tables = [Path(f"{leaf_tables}-train.csv"), Path(f"{leaf_tables}-test.csv")] if leaf_classes else []
    missing = [table for table in tables if not table.exists()]
    try:
        return inspect_and_write(
            place,
            recipe,
            model=model,
            init=init,
            imported=imported,
            minutes=minutes,
            unlabelled=unlabelled,
            probe=probe,
            leaf_tables=leaf_tables,
        )
    except BaseException:
        # The next command would refuse to overwrite a table that this one has written.
        for table in missing:
            table.unlink(missing_ok=True)
        raise


def inspect_and_write(
    place: str,
    recipe: Path,
    *,
    model: str | None,
    init: str | None,
    imported: Path | None,
    minutes: float | None,
    unlabelled: bool,
    probe: bool,
    leaf_tables: str | None,
) -> Answer:
    """Write a recipe for the images at a path, after the arguments were checked. Raises the errors of `new`."""
    # 2. Inspect the images.
    sets = survey(place, unlabelled=unlabelled, leaf_tables=leaf_tables, report=ProgressMeter("images"))
    whole = Path(place).resolve()
    if sets.train.source == "folder" and Path.cwd().is_relative_to(whole):
        raise UsageError(
            f"{place} contains the current folder, so the run would be written into the folder of the images\n"
            f"  run cd {shlex.quote(str(whole.parent))}, then python -m jobs new {shlex.quote(whole.name)}"
        )
    describe(sets.train)
    bad = sets.train.bad.total()
    if bad > MAX_SHARE_OF_BAD * sets.train.opened:
        raise DataError(
            f"{bad} of {sets.train.opened} opened images cannot be read; the first is {sets.train.first_bad}\n"
            f"  expected at most {MAX_SHARE_OF_BAD:.0%}; restore these images from their source, or remove them"
        )
    if init is not None and not sets.train.classes:
        raise UsageError("--init needs labels for fine-tuning, but these images have none\n  omit --init to pretrain")
    if init is not None and imported is not None:
        from jobs.extras.conversion import import_foreign

        echo(f"importing {init}, which is in the format of another library, into {imported}")
        import_foreign(init, str(imported))
        init = str(imported)
    if sets.test is not None:
        describe(sets.test)
    elif not sets.train.classes and not unlabelled:
        echo("no labels: masked patch prediction learns features, but no classes")
        # The folder may be one of several class folders.
        folder = Path(sets.train.path)
        siblings = []
        for other in sorted(folder.parent.glob("[!.]*/")):
            if other != folder and any(path.suffix[1:].lower() in IMAGES for path in other.glob("*")):
                siblings.append(other.name)
        if sets.train.source == "folder" and siblings:
            above = shlex.quote(str(folder.parent))
            echo(
                f"if this folder is one class, and the folders {preview(siblings)} next to it are other classes, "
                f"run python -m jobs new {above}"
            )
        else:
            echo(f"to train on classes, {HOW_TO_ADD_CLASSES[sets.train.source]}")
    elif sets.held_out:
        echo(f"held out: {sets.held_out}% of each class for evaluation, because no part is named val or test")
        single = [name for name, images in sets.train.class_counts.items() if images == 1]
        if single:
            echo(
                f"{counted(len(single), 'class')} with one image: {preview(single)}; classes whose image is held out "
                "cannot be learned: add images, or remove these classes"
            )
    elif sets.train.classes:
        echo("held out: nothing, because most classes have too few images; accuracy is not measured")

    name = unused_run_name(recipe)
    if probe and init is not None:
        write_probe(recipe, name, sets, init)
        return written(recipe, name, sets)

    # 3. Select the training settings.
    from jobs.extras.new.training import MINUTES_ON_CPU, MINUTES_ON_GPU, choose, this_machine

    activity.now("new: measuring the training speed of this machine on one core …")
    machine = this_machine()
    if minutes is None:
        minutes = MINUTES_ON_GPU if machine.gpus else MINUTES_ON_CPU
    choice = choose(sets, machine, 60 * minutes, name=model, init=init)
    write_recipe(recipe, name, sets, choice, machine)
    answer = written(recipe, name, sets)
    values = {"steps": choice.steps, "batch_size": choice.batch_size, "images_per_s": choice.rate}
    return replace(answer, document={**answer.content(), **values})


def written(recipe: Path, name: str, sets: Sets) -> Answer:
    """Return the command's answer for a written recipe: its images, its run, and the next command."""
    found = {}
    for part, image_set in (("train", sets.train), ("test", sets.test)):
        if image_set is not None:
            counts = dict(image_set.class_counts)
            found[part] = {"path": image_set.path, "images": image_set.images, "class_counts": counts}
    command = f"python -m jobs run {shlex.quote(str(recipe))}"
    text = f"next: {command}\n  this writes runs/{name}; to resume after an interruption, run the same command again"
    document = {
        "recipe": str(recipe),
        "run": f"runs/{name}",
        "sets": found,
        "held_out_percent": sets.held_out,
        "next": [{"do": "run", "command": command, "text": text}],
    }
    return Answer(document, lambda document: document["next"][0]["text"].splitlines())


def unused_run_name(recipe: Path) -> str:
    """Return a name for a recipe's run: the name of the recipe file, plus a number if runs/ already has such a run."""
    name = re.sub(r"[^\w-]+", "-", recipe.stem).strip("-") or "images"
    unused = name
    number = 2
    while Path("runs", unused).exists():
        unused = f"{name}-{number}"
        number += 1
    return unused


def name_of(place: str) -> str:
    """Derive a recipe's name from the path of its images: photos for photos/train, cifar10 for cifar10-train-*.tar."""
    path = Path(place)
    if path.name in ("", ".", ".."):
        path = path.resolve()
    stem = re.sub(r"[-_.]?[*{].*|(\.\w+)+$", "", path.name)
    stem = re.sub(r"[-_.]*(train|training)[-_.]*$", "", stem, flags=re.IGNORECASE) or path.resolve().parent.name
    return re.sub(r"[^\w-]+", "-", stem).strip("-") or "images"


def describe(image_set: FoundSet) -> None:
    """Print the contents of a data set, and the excluded images."""
    text = f"{image_set.path}: {image_set.images:,} images"
    if image_set.classes:
        largest = []
        for name, count in image_set.class_counts.most_common(3):
            # Mark a class named by a number, to distinguish it from the count.
            shown = f"class {name}:" if name.isdigit() else printable(name[:40])
            largest.append(f"{shown} {count:,}")
        if len(image_set.class_counts) > len(largest):
            largest.append("…")
        text += f" of {image_set.classes:,} classes ({', '.join(largest)})"
    else:
        text += " without labels"
    if image_set.sides:
        height, width = sorted(image_set.sides, key=min)[len(image_set.sides) // 2]
        text += f", median size {width} × {height} px"
    if image_set.bad:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in image_set.bad.most_common())
        text += f"; {image_set.bad.total()} of {image_set.opened} opened images cannot be read: {reasons}"
        if image_set.first_bad:
            text += f"; the first is {image_set.first_bad}"
    echo(text)
    for note in image_set.notes:
        echo(f"  {note}")


def inputs_of(sets: Sets) -> tuple[dict[str, dict[str, Any]], dict[str, str], str]:
    """Return the data sets to pack, the quoted training and test paths, and the data set to split for evaluation."""
    places = {}
    packed = {}
    for set_name, image_set in (("train", sets.train), ("test", sets.test)):
        if image_set is None:
            continue
        places[set_name] = quoted(image_set.path)
        if image_set.source == "index":
            continue
        values: dict[str, Any] = {"source": image_set.source, "path": places[set_name]}
        if image_set.split:
            values["split"] = image_set.split
        if not sets.train.classes:
            values["unlabelled"] = True
        packed[set_name] = values
        places[set_name] = f'"@shards/{set_name}"'
    path_of_parts = places["train"]
    if sets.held_out:
        places = {"train": '"@parts/train"', "test": '"@parts/held-out"'}
    return packed, places, path_of_parts


def write_recipe(path: Path, name: str, sets: Sets, choice: "TrainingChoice", machine: "Machine") -> None:
    """Render and write the recipe, with a comment on the reason for each choice."""
    # 1. The cluster.
    cluster: dict[str, Any] = {"backend": "processes", "workers": machine.workers}
    cores_of_worker = max(1, machine.cores // machine.workers)
    if machine.gpus:
        cluster["gpus_per_worker"] = 1
    if cores_of_worker > 1:
        cluster["cpus_per_worker"] = cores_of_worker

    # 2. The inputs of the stages: sets without an index are packed first, then a part of them is held out.
    packed, places, path_of_parts = inputs_of(sets)
    if choice.init is not None:
        places["init"] = quoted(choice.init)

    passes = f"{choice.steps * choice.batch_size / sets.images:.3g}"
    unit = "passes"
    if passes == "1":
        unit = "pass"
    seconds = duration(choice.steps * choice.batch_size / choice.rate)
    text = render(
        "new.yaml.jinja",
        train=sets.train,
        percent=sets.held_out,
        choice=choice,
        machine=machine,
        name=name,
        path_in_shell=shlex.quote(str(path)),
        cluster=cluster,
        packed=packed,
        bad_fraction=bad_fraction(sets.train),
        unlabelled=unlabelled_in_training(sets.train),
        path_of_parts=path_of_parts,
        places=places,
        processes=min(16, max(1, cores_of_worker - 1)),
        lr_of_finetuning=f"{choice.finetuning.lr_at(choice.batch_size):.1g}" if choice.finetuning else "",
        passes=passes,
        duration=seconds,
    )
    write_atomically(path, as_typed(text))
    echo(
        f"wrote {path}: {choice.steps:,} steps of {choice.batch_size} images, {passes} "
        f"{unit}, about {seconds} at {amount(choice.rate)} images/s on {machine.name}"
    )
    if choice.is_over_time:
        echo(
            f"  this takes longer than --minutes, because useful training takes at least {choice.steps} steps\n"
            f"  to change this, delete {path} and use a smaller --model or more --minutes"
        )


def bad_fraction(image_set: FoundSet) -> str:
    """Return a limit on the fraction of bad samples, above which a run stops; "" if the default is enough.

    Twice the observed fraction, because a decoder can reject an image with a valid header. If only some images were
    opened, another 3 / opened, so that the fraction among all images is below the limit with a confidence of 95 % (if
    no bad image was found, this is the rule of three; Hanley & Lippman-Hand 1983).

    Training also counts unlabelled samples as bad, and the one that replaces a sample can be unlabelled too: twice
    their number for each labelled sample. Other sources than tars and indexes exclude them from the packed set.
    """
    allowed = 2.0 * image_set.bad.total()
    if image_set.opened < image_set.images:
        allowed += 3
    fraction = allowed / image_set.opened if image_set.opened else 0.0
    if unlabelled_in_training(image_set):
        fraction += 2 * unlabelled_in_training(image_set) / image_set.labelled
    return f"{min(fraction, 1):.2g}" if fraction else ""


def unlabelled_in_training(image_set: FoundSet) -> int:
    """Return the number of samples that training reads and replaces because they have no label."""
    if not image_set.classes or image_set.source not in ("shards", "index"):
        return 0
    return image_set.images - image_set.labelled


def write_probe(path: Path, name: str, sets: Sets, init: str) -> None:
    """Render and write a recipe for a linear probe, which fits classifiers to the features of a frozen model."""
    packed, places, path_of_parts = inputs_of(sets)
    if "test" not in places:
        raise UsageError(
            "--probe needs images to measure accuracy on, but no part is named val or test, and the classes have too "
            "few images to hold some out\n  add a folder named val"
        )
    from pipeline.evaluation import any_weights

    recorded = any_weights.recorded_preprocessing(init)
    preprocessing = "not recorded: resized to the model's size" if recorded is None else f"recorded: {recorded.ops}"
    text = render(
        "probe.yaml.jinja",
        train=sets.train,
        percent=sets.held_out,
        name=name,
        path_in_shell=shlex.quote(str(path)),
        packed=packed,
        path_of_parts=path_of_parts,
        places={**places, "init": quoted(init)},
        preprocessing=preprocessing,
    )
    write_atomically(path, as_typed(text))
    echo(f"wrote {path}: a linear probe and a nearest-neighbour classifier on the features of {init}")


def render(template: str, **values: Any) -> str:
    """Render a template from this folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["flow"] = flow_yaml
    return environment.get_template(template).render(**values)


def quoted(path: str) -> str:
    """Return a path as an absolute, quoted string for a recipe."""
    # Escape ${…}, which OmegaConf would interpolate.
    text = str(Path(path).absolute()).replace("${", "\\${")
    return json.dumps(text, ensure_ascii=False)
