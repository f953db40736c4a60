"""Mistakes of new users, and the error for each: what is wrong, what was expected, and what to type.

Each line is typed in a folder with `tiny.yaml` (a recipe), `photos` (class folders; `two words` is a link to it, and
`wheel` a copy with a link to itself), `loose` (images without folders), `tars` and `labelless` (tars without an index),
`empty`, the data sets `shards/train` and `shards/test`, `weights` (our format), `weights.npz` (the same weights in
the official format) and `nan` (weights with NaN). Each error must have the right exit code, at most six lines, and no
Python internals.
"""

import io
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

import models
from data.files import import_path
from jobs.__main__ import main
from jobs.recipe.records import stage_record
from pipeline.artifacts import write_record
from tests.support.campaigns import load

pytestmark = pytest.mark.quick

TINY = """\
run: runs/tiny
cluster: {workers: 2, backend: processes}
pretrain:
  data: {train: shards/train, evaluate: shards/test}
  model: {name: mu/8, image_size: 16, classes: 10}
  optim: {lr: 2.0e-3, schedule: {warmup_steps: 5}}
  loss: softmax
  steps: 24
  batch_size: 16
  micro_batch: 4
  precision: fp32
"""
MAX_LINES = 6
INTERNALS = re.compile(
    r"Traceback|\w+Config\b|Dict\[|codec|<class|\w+Error\b|pydantic|omegaconf|NoneType|0x[0-9a-f]{4}"
)

# Each line: exit code, arguments of `python -m jobs`, and after => the expected parts of the error, separated by |.
COMMANDS = """
64 train tiny.yaml                            => No such command 'train'.|use run instead
64 runn tiny.yaml                             => Did you mean 'run'?
64 run                                        => expected a YAML file or a built-in recipe: cifar10, cifar10_bit, digits
64 run tiny.yaml --gpus 1                     => --gpus|keys without dashes: pretrain.optim.lr=1e-3
64 run tiny.yaml --batch-size 128             => No such option: --batch-size|without dashes: pretrain.batch_size=128
64 plan tiny.yaml --lr=0.1                    => No such option: --lr|without dashes: pretrain.optim.lr=0.1
78 plan tiny.yaml --gpu 24gb                  => --gpu is 24gb|set cluster.gpu_memory_gb=24
64 plan tiny.yaml --resolve                   => Possible options: --fresh, --resolved
78 run tiny.yaml pretrain.steps 100           => invalid override pretrain.steps|for example pretrain.steps=100
78 run tiny.yaml pretrain.steps = 100         => without spaces, for example pretrain.steps=100
78 run tiny.yaml pretrain.steps: 100          => for example pretrain.steps=100
78 run tiny.yaml other.yaml                   => invalid override other.yaml|expected key=value
78 run tiny                                   => no recipe at tiny|did you mean tiny.yaml?
78 run digist                                 => did you mean digits?
78 run Tiny.yaml                              => no recipe at Tiny.yaml|did you mean tiny.yaml?
78 run quite.yaml                             => no recipe at quite.yaml|built-in recipes: cifar10
78 run photos                                 => photos is a folder, not a recipe
78 run photos/cat/0.jpg                       => photos/cat/0.jpg is not UTF-8 text|expected a recipe (a YAML file)
64 status tiny.yaml                           => no run at|expected a run directory or a stage's folder in it
64 checkpoints list runs/none                 => no checkpoints in|expected a run directory
64 checkpoints verify runs/none --step ten    => checkpoints verify was changed|checkpoints verify runs/none/step-ten
64 replay runs/none step=120                  => no run at runs/none|expected a run directory
64 audit runs/none                            => no run at runs/none
64 status .                                   => no run at
64 new photos --minutes 2weeks                => '2weeks' is not a duration|2min
78 plan tiny.yaml pretrain.bs=64              => unknown key pretrain.bs; did you mean 'batch_size'?
65 new photso                                 => did you mean 'photos'?
64 new two words                              => 'two words' is a single folder|quote its name
65 new wheel                                  => links to a folder above it|remove the link
65 pack folder wheel out                      => links to a folder above it
65 pack folder loose out                      => found none|--unlabelled
78 run photos                                 => photos is a folder, not a recipe|jobs new photos
64 run tiny.yaml --minutes 2                  => --minutes is an option of the command new
64 analyze weights empty --output out         => no images in empty
64 analyze weights phtos --output out         => did you mean 'photos'?
78 export weights out --format hf --preprocess resize(8 => lacks a bracket
64 export                                     => Missing argument 'WEIGHTS'|jobs export runs/photos/pretrain exported
64 export weights                             => Missing argument 'TARGET'|exported --format timm
64 export weights out.npz                     => out.npz is named like a .npz file|expected a name without .npz
64 export weights out --format onnx           => 'onnx' is not one of
65 export runs/none out --format hf           => no file or folder at runs/none
65 export photos out --format hf              => cannot load photos|contains neither model.json
65 new photos --init nan                      => cannot load nan: 1 of|contain NaN or infinity|use the weights of an
64 new photos --minutes 0                     => --minutes is 0, expected a finite training time|pass --minutes 10
78 new photos --model S16                     => S16 is not a model name; did you mean S/16?
65 new photos --init photos                   => contains no weights|expected RUN/STAGE
64 new loose --init weights                   => --init needs labels for fine-tuning|omit --init
64 new photos --output empty                  => --output empty is a folder|for example empty/photos.yaml
64 new photos --output nowhere/x.yaml         => the folder nowhere does not exist
64 new photos/cat photos/dog loose            => no folder or pattern matches exactly these|a quoted pattern
64 analyze weights photos                     => Missing option '--output'|photos/cat --output pictures
64 analyze weights nowhere --output out       => no such file or folder: nowhere|expected image files
64 evaluate                                   => Missing argument 'WEIGHTS'|pretrain runs/photos/parts/held-out
64 evaluate weights                           => Missing argument 'SET|evaluate runs/photos/pretrain runs/photos/parts
64 evaluate weights train=shards/train        => a data set to evaluate on|evaluate weights runs/photos/parts/held-out
64 new                                        => Missing argument 'images|for example: python -m jobs new photos
65 evaluate weights 'two words'               => pack folder 'two words' 'two words-shards'
65 index 'two words'                          => pack folder 'two words' 'two words-shards'
65 evaluate weights photos                    => images in 2 folders|python -m jobs pack folder photos photos-shards
65 evaluate shards/test weights               => shards/test is a data set, not weights|give the weights first
65 evaluate nowhere shards/test               => no file or folder at nowhere|expected an official .npz
64 evaluate weights shards/test --protocol top1 => did you mean 'top-1'?
65 import nowhere.npz out                     => no file or folder at nowhere.npz
65 import tiny.yaml out                       => cannot load tiny.yaml|the file is not a weights file
64 pack photos out                            => for example: python -m jobs pack folder photos/train shards/train
64 pack photo photos out                      => source is photo|expected one of folder, table, tars
65 pack folder nowhere out                    => no file or folder at nowhere
65 pack folder loose out                      => found 3 images|sort the images into class folders
65 pack folder tars out                       => 1 tars|python -m jobs index tars
65 pack folder photos photos                  => photos is inside the source|use another folder
64 pack folder photos tiny.yaml               => tiny.yaml is a file|expected a folder
65 pack folder photos shards/train            => a finished data set|use another folder
74 pack folder photos /sys/out                => /sys/out|a folder that this user may write
65 pack table tiny.yaml out                   => expected a column of paths (path, file_name|for example path,label
65 pack table photos out                      => photos is a folder|expected a CSV or Parquet file
65 index photos                               => no *.tar here|python -m jobs pack folder photos photos-shards
65 index nowhere                              => this folder does not exist
65 index labelless                            => no sample has a usable label|expected samples with an image
65 data check photos                          => python -m jobs pack folder photos photos-shards
65 data repair shards/train shards/train      => contains the data set to repair|use another folder
78 subset shards/train --output out           => the subset has no rule|expected one or more of keep
78 subset shards/train --shots 5 --output out => shots needs a seed, but no seed is set|set a seed
78 plan tiny.yaml --gpu v100                  => did you mean 'h100'?
74 run tiny.yaml run=/sys/run                 => /sys/run|or use another folder: run=/elsewhere
69 run tiny.yaml cluster.gpus_per_worker=99   => at least 198 GPUs for 2 workers|cluster.gpus_per_worker=0
"""

# The same for `plan tiny.yaml`, with the arguments after it.
KEYS = """
78 lr=1e-3                          => lr is 0.001, expected a stage's section|for example pretrain.optim.lr=0.001
78 optim.lr=1e-3                    => optim is a key of a stage (pretrain.optim), not a stage
78 Pretrain.steps=3                 => unknown stage or key Pretrain; did you mean 'pretrain'?
78 pretrain.lr=1e-3                 => unknown key pretrain.lr; did you mean pretrain.optim.lr?
78 pretrain.epochs=3                => did you mean pretrain.passes?
78 pretrain.batchsize=3             => did you mean pretrain.batch_size?
78 pretrain.num_classes=3           => did you mean pretrain.model.classes?
78 pretrain.image_size=32           => did you mean pretrain.model.image_size?
78 pretrain.optim.LR=1              => did you mean pretrain.optim.lr?
78 pretrain.augmentation=true       => unknown key pretrain.augmentation; did you mean pretrain.data.augment?
78 pretrain.zzz=1                   => unknown key pretrain.zzz|all keys: docs/configuration.md
78 cluster.gpus=1                   => did you mean cluster.gpus_per_worker?
78 pretrain.optim=1e-3              => expected a section with the keys name, lr|pretrain.optim.lr=0.001
78 pretrain.data=shards/train       => for example, set pretrain.data.train=shards/train
78 pretrain.optim.lr.peak=1e-3      => pretrain.optim.lr is {peak: 0.001}, expected a number
78 cluster=4                        => cluster is 4, expected a section with the keys workers
78 pretrain.model.dropuot=0.1       => no field 'dropuot'; did you mean 'dropout'?
78 pretrain.model=S16               => did you mean S/16?
78 pretrain.model=vit_small_patch16_224 => did you mean S/16?|expected a size and a patch
78 pretrain.model.name=Z/16         => unknown size 'Z'
78 'pretrain.model={name: mu/8, image_size: 16' => quote the whole override
65 pretrain.model.classes=2         => labels up to 9, but the model has only 2 classes|set pretrain.model.classes=10
78 pretrain.model.classes=ten       => classes must be a whole number
78 pretrain.model.image_size=20     => nearest image_size: 16 or 24
78 pretrain.model.image_size=224x224 => one or two positive integers
78 pretrain.model.heads=5           => not a multiple of 5 heads; nearest: 30 or 35
78 pretrain.model.dropout=50%       => dropout must be a number, found 50%
78 pretrain.model.pool=avg          => pool must be one of token, gap, map
78 pretrain.steps=many              => pretrain.steps is many, expected a whole number
78 pretrain.steps=1.5               => pretrain.steps is 1.5, expected a whole number
78 pretrain.steps=-5                => steps is -5, expected more than 0
78 pretrain.steps=10,000            => set pretrain.steps=10000
78 pretrain.steps=3                 => 5 warm-up steps exceed|warmup_steps=0
78 pretrain.passes=3                => both steps=|set passes=null
78 pretrain.optim.lr=0,001          => expected a number|set pretrain.optim.lr=0.001
78 pretrain.optim.lr=fast           => pretrain.optim.lr is fast, expected a number
78 pretrain.optim.lr=-1             => optim.lr is -1.0, expected more than 0
78 pretrain.label_smoothing=10%     => set pretrain.label_smoothing=0.1
78 pretrain.timeout_s=soon          => expected a number of seconds, or one with a unit: 90s, 30min or 2h
78 pretrain.timeout_s=5GB           => expected a number of seconds
78 pretrain.data.cache.limit_bytes=2h => expected a number of bytes, or one with a unit: 500MB, 80GB or 80GiB
78 pretrain.compile=maybe           => pretrain.compile is maybe, expected true or false
78 pretrain.data.augment.flip=2     => pretrain.data.augment.flip is 2, expected true or false
78 pretrain.zero=5                  => zero is 5, expected ZeRO stage 0, 1, 2 or 3
78 pretrain.precision=fp16          => did you mean 'bf16'?|expected one of bf16, fp32
78 pretrain.optim.name=adamw        => did you mean 'adam'?
78 pretrain.objective=masked        => does not use labels; remove
78 pretrain.batch_size=10           => nearest: 8 or 16|uneven=true
78 pretrain.batch_size=2            => set micro_batch=1
78 pretrain.keep=0                  => keep is 0, expected 2 or more
78 pretrain.probe.shots=5           => expected a list of whole numbers|pretrain.probe.shots=[5]
78 pretrain.data.drop=a.tar         => for example, set pretrain.data.drop=[a.tar]
78 pretrain.data.augment.crop=center => expected one of inception, random, none
78 pretrain.data.augment.min_area=2 => min_area is 2.0, expected at most 1
78 pretrain=null                    => pretrain is null, expected a stage's section
78 pretrain.init=None               => pretrain.init is None, which YAML reads as a string|set pretrain.init=null
78 cluster.workers=two              => cluster.workers is two, expected a whole number
78 cluster.workers=0                => workers is 0, expected 1 or more
78 cluster.workers=3                => not a multiple of micro_batch 4 × 3 workers = 12; nearest: 12 or 24
78 cluster.backend=local            => expected one of ray, processes
78 cluster.environment.WANDB_API_KEY=abc => looks like a secret|secrets belong on the nodes
78 cluster.environment=NCCL_DEBUG   => set cluster.environment.NAME=…
78 pretrain.data.decode=gpu         => cluster.gpus_per_worker is 0|set pretrain.data.decode=cpu
65 pretrain.data.train=nowhere      => nowhere: this index does not exist|expected a folder
65 pretrain.data.train=photos       => python -m jobs pack folder photos photos-shards, then use photos-shards
65 pretrain.data.train=photos/cat   => use the parent folder
65 pretrain.data.train=photos/cat/0.jpg => photos/cat/0.jpg is an image
65 pretrain.data.train=loose        => images without class folders|loose/cat/1.jpg
65 pretrain.data.train=tars         => run python -m jobs index tars
65 pretrain.data.train=tars/a.tar   => is a tar, one shard of a set|run python -m jobs index tars
65 pretrain.data.train=empty        => neither tars nor images
65 pretrain.data.train=shards       => use one of shards/test, shards/train
78 pretrain.data.train=@shards/train => pretrain.data.train is @shards, but the recipe has no stage shards; known
78 pretrain.data.train=@pretrain    => the stage itself|expected another stage, or a path
78 pretrain.data.train=null         => pretrain.data.train is missing|set pretrain.data.train=FOLDER
65 pretrain.init=nowhere            => no weights.safetensors in nowhere|pass a folder that contains this file
65 pretrain.init=weights.npz        => python -m jobs import weights.npz FOLDER
65 pretrain.init=weights/weights.safetensors => pass its folder: weights
78 pretrain.init=weights pretrain.model.name=Ti/8 => width: 32 -> 192|remove these keys and the name from `model`
78 pretrain.deepspeed=nowhere.json  => No such file|or deepspeed=null
78 run=                             => run is empty, expected a folder
78 run=tiny.yaml                    => tiny.yaml is a file|use another folder: run=…
78 run=~nobody-here/x               => but there is no such user
78 run=s3://bucket                  => set run=s3://BUCKET/NAME
"""

# Text of the recipe, exit code of `plan recipe.yaml`, and expected parts of the error.
RECIPES: dict[str, tuple[str | bytes, int, str]] = {
    "empty": ("", 78, "recipe.yaml has no stage|expected a section named pack, pretrain"),
    "a list": ("- pretrain\n", 78, "does not contain a mapping|expected lines such as `key: value`"),
    "a text": ("pretrain\n", 78, "does not contain a mapping|expected lines such as `key: value`"),
    "tabs": (TINY.replace("  steps", "\tsteps"), 78, "line 8: found a tab|expected spaces"),
    "a key twice": (TINY + "  steps: 30\n", 78, "line 12: found duplicate key steps|remove one of the duplicates"),
    "one space more": (TINY.replace("  steps", "   steps"), 78, "line 8|the keys of a section in the same column"),
    "no indentation": (TINY.replace("\n  ", "\n"), 78, "pretrain is null|or make it a section"),
    "no space behind a colon": (TINY.replace("steps: 24", "steps:24"), 78, "line 8|steps:24|with a space after"),
    "an equals sign": (TINY.replace("steps: 24", "steps = 24"), 78, "line 8|steps = 24|expected `key: value`"),
    "an open brace": (TINY.replace("classes: 10}", "classes: 10"), 78, "line 5|matching brackets and braces"),
    "an open quote": (TINY.replace("shards/train", '"shards/train'), 78, "line 4|a closing quote"),
    "@ without quotes": (TINY.replace("shards/train", "@shards/train"), 78, 'line 4|"@shards/train"'),
    "backslashes": (TINY.replace("shards/train", '"C:\\photos"'), 78, "line 4|single quotes"),
    "a variable of the shell": (TINY.replace("shards/train", "$PHOTOS"), 65, "$PHOTOS: this index does not exist"),
    "an unknown variable": (
        TINY.replace("runs/tiny", "${oc.env:NO_SUCH}"),
        78,
        "variable 'NO_SUCH' not found\n  in run\n  set it",
    ),
    "Latin-1": (
        TINY.replace("runs/tiny", "runs/größe").encode("latin-1"),
        78,
        "not UTF-8 text: invalid byte at 12, in line 1",
    ),
    "UTF-16": (TINY.encode("utf-16"), 78, "is UTF-16 text|iconv -f UTF-16 -t UTF-8 recipe.yaml|saved as UTF-8"),
    "a control character": (TINY.replace("tiny", "ti\x07ny"), 78, "text without control characters"),
    "a list for a section": (TINY.replace("optim: {", "optim: [{").replace("}}", "}}]"), 78, "expected a section"),
    "a stage without content": (TINY + "finetune:\n", 78, "finetune is null, expected a stage's section"),
    "a stage of no kind": (TINY + "mine: {steps: 3}\n", 78, "unknown stage or key mine|mine.kind=… with one of pack"),
    "a kind that is none": (TINY + "mine: {kind: training}\n", 78, "mine.kind is training|expected one of pack"),
    "a name with a space": (TINY + "my stage: {kind: pretrain}\n", 78, "a stage is named 'my stage'|rename it"),
    "a circle": (TINY + '  init: "@finetune"\nfinetune: {init: "@pretrain"}\n', 78, "in a cycle: pretrain ← finetune"),
    "a misspelt reference": (
        TINY + 'resize: {init: "@pretain"}\n',
        78,
        "@pretain, but the recipe has no stage pretain; did you mean",
    ),
    "finetune from nothing": (TINY + "finetune: {data: {train: shards/train}}\n", 78, "model.name is missing|S/16"),
    "resize from nothing": (TINY + "resize: {image_size: 24}\n", 78, "resize.init is missing|set resize.init=…"),
    "an odd size": (TINY + 'resize: {init: "@pretrain", image_size: 25}\n', 78, "nearest image_size: 24 or 32"),
    "a model without a size": (re.sub("model: {.*}", "model: mu/8", TINY), 78, "model.image_size is missing"),
    "a set that cannot be packed": (
        TINY + "pack: {sets: {train: {path: loose}}}\n",
        65,
        "found 3 images|sort the images",
    ),
    "a sweep over one value": (TINY + "  sweep: {grid: {optim.lr: 1e-3}}\n", 78, "expected a list of values"),
}

# Accepted spellings of values, and recipes saved by other editors.
TAKEN = ["pretrain.steps=10k", "pretrain.timeout_s=30min", "pretrain.data.cache.limit_bytes=80GB", "pretrain.steps=1e4"]
TAKEN_RECIPES = {
    "UTF-8 with a byte order mark": TINY.encode("utf-8-sig"),
    "Windows line ends": TINY.replace("\n", "\r\n").encode(),
    "a number in quotes": TINY.replace("batch_size: 16", 'batch_size: "16"').encode(),
    "a number that YAML takes for a text": TINY.replace("2.0e-3", "2e-3").encode(),
    "a boolean word in quotes": (TINY + '  compile: "no"\n').encode(),
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Return the folder in which the lines are typed; no mistake may change it."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "tiny.yaml").write_text(TINY)
    shutil.copytree(shards, folder / "shards")
    for name in ("photos/cat", "photos/dog", "loose", "empty", "tars", "labelless"):
        (folder / name).mkdir(parents=True)
    for place in ("photos/cat", "photos/dog", "loose"):
        for number in range(3):
            Image.new("RGB", (20, 20), (number * 50, 0, 99)).save(folder / place / f"{number}.jpg")
    (folder / "two words").symlink_to("photos")
    shutil.copytree(folder / "photos", folder / "wheel")
    (folder / "wheel" / "loop").symlink_to(".")
    image = (folder / "loose" / "0.jpg").read_bytes()
    for name, members in (("tars", {"0.jpg": image, "0.cls": b"1"}), ("labelless", {"0.jpg": image})):
        with tarfile.open(folder / name / "a.tar", "w") as tar:
            for member, content in members.items():
                entry = tarfile.TarInfo(member)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    model = models.build("mu/8", image_size=16, classes=10)
    models.save(model, folder / "weights", "safetensors")
    models.save(model, folder / "weights.npz", "npz")
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    models.save(model, folder / "nan", "safetensors")
    return folder


def mistakes() -> list[tuple[str, int, str]]:
    """Return (typed line, exit code, parts of the error) from the two tables of lines."""
    rows = []
    for table, before in ((COMMANDS, ""), (KEYS, "plan tiny.yaml ")):
        for line in filter(None, table.splitlines()):
            typed, words = line.split("=> ")
            code, typed = typed.strip().split(" ", 1)
            rows.append((before + typed.replace("<none>", ""), int(code), words))
    return rows


def check_answer(capsys: pytest.CaptureFixture[str], words: str) -> None:
    """Check the error for the parts in the table, its length, and Python internals."""
    # On a slow machine, progress is printed too.
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("plan: reading")]
    answer = "\n".join(lines)
    for part in words.split("|"):
        assert part in answer, answer
    assert len(lines) <= MAX_LINES, answer
    assert not INTERNALS.search(answer), answer


@pytest.mark.parametrize(("typed", "code", "words"), mistakes(), ids=[row[0] for row in mistakes()])
def test_a_mistake_gets_an_error_with_a_remedy(desk, monkeypatch, capsys, typed, code, words):
    monkeypatch.chdir(desk)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(shlex.split(typed)) == code
    check_answer(capsys, words)
    # A refused command writes nothing.
    assert not [path for path in desk.iterdir() if path.name.startswith(("out", "photos-shards"))]


@pytest.mark.parametrize("name", RECIPES)
def test_an_invalid_recipe_gets_an_error_with_a_remedy(desk, monkeypatch, capsys, name):
    text, code, words = RECIPES[name]
    monkeypatch.chdir(desk)
    monkeypatch.setattr("jobs.terminal.WAIT_S", 60)
    (desk / "recipe.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["plan", "recipe.yaml"]) == code
    check_answer(capsys, words)


@pytest.mark.parametrize("kind", ["finetune", "resize"])
def test_an_unknown_stage_is_an_error_that_lists_the_stages(desk, monkeypatch, capsys, kind):
    monkeypatch.chdir(desk)
    assert main(["run", "tiny.yaml", "--only", kind]) == 78
    check_answer(capsys, f"the recipe has no stage '{kind}'; known: pretrain")


def test_too_many_workers_and_evaluation_on_the_training_set_are_warned_about(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    assert main(["plan", "tiny.yaml", "cluster.workers=64", "pretrain.batch_size=256"]) == 0
    assert "64 workers with 1 CPUs each share" in capsys.readouterr().out
    assert main(["plan", "tiny.yaml", "pretrain.data.evaluate=shards/train"]) == 0
    assert "data.evaluate is also a training set" in capsys.readouterr().out


def test_a_stage_that_starts_over_lists_the_changed_keys(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    (stage,) = load(Path("tiny.yaml"), []).stages
    record = stage_record(stage)
    folder = desk / "runs" / "anew" / "pretrain-00000001"
    folder.mkdir(parents=True)
    write_record(folder / "stage.json", {**record, "forbid": {**record["forbid"], "steps": 12, "batch_size": 8}})
    write_record(folder / "done.json", {"key": "1", "seconds": 1.0})
    assert main(["plan", "tiny.yaml", "run=runs/anew"]) == 0
    shutil.rmtree(desk / "runs" / "anew")
    out = capsys.readouterr().out
    assert "pretrain starts from step 0, because its settings differ from pretrain-00000001, finished" in out
    assert (
        "(kept): batch_size: 8 → 16, steps: 12 → 24\n" in out or "(kept): steps: 12 → 24, batch_size: 8 → 16\n" in out
    )
    assert f"to start from those weights instead of random ones, set pretrain.init={folder}" in out
    assert "train longer" not in out, "the batch size has changed too"


def test_another_model_name_keeps_no_sizes_of_the_first(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    wide = TINY.replace("name: mu/8,", "name: mu/8, width: 64, depth: 3,")
    (desk / "recipe.yaml").write_text(wide)
    for override in ("pretrain.model=Ti/8", "pretrain.model={name: Ti/8}"):
        assert main(["plan", "recipe.yaml", override, "--resolved"]) == 0
        section = capsys.readouterr().out.partition("  model:\n")[2].splitlines()[:3]
        assert sorted(map(str.strip, section)) == ["classes: 10", "image_size: 16", "name: Ti/8"]
    assert main(["plan", "recipe.yaml", "pretrain.model.name=Ti/8"]) == 78
    check_answer(
        capsys,
        "but the recipe's model also sets width: 64, depth: 3, which would override the name|set pretrain.model=Ti/8",
    )
    # The same image size with another patch size keeps them.
    assert main(["plan", "recipe.yaml", "pretrain.model.name=mu/4", "--resolved"]) == 0
    assert "width: 64" in capsys.readouterr().out


def test_a_typo_does_not_import_torch_and_a_closed_pipe_is_not_a_disk_error(desk):
    environment = {**os.environ, "PYTHONPATH": import_path()}
    lines = (
        "export nowhere out --format hf",
        "export weights photos --format hf",
        "import nowhere.npz out",
        "analyze nowhere photos --output out",
        "evaluate nowhere shards/test",
        "evaluate weights nowhere",
        "replay photos step=1",
        "audit runs/none",
        "without runs/none --shards x",
        "import tiny.yaml out",
        "evaluate tiny.yaml shards/test",
        "analyze weights empty --output out",
        "export weights out --format hf --preprocess resize(8",
        "checkpoints list runs/none",
        "leaks nowhere --test shards/test --output out",
        "new nowhere",
        "new photos --model S16",
        "plan tiny.yaml --gpu v100",
    )
    program = "import sys; from jobs.__main__ import main\nfor line in sys.argv[1:]:\n"
    program += "    code = main(line.split()); assert code and 'torch' not in sys.modules, line"
    subprocess.run([sys.executable, "-c", program, *lines], cwd=desk, env=environment, check=True, timeout=120)
    command = [sys.executable, "-m", "jobs", "plan", "tiny.yaml", "--resolved"]
    with subprocess.Popen(
        command, cwd=desk, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        # On a busy machine, progress is printed too.
        assert process.stderr.read().decode().replace("plan: starting …\n", "") == ""
        assert process.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("override", TAKEN)
def test_values_may_have_common_suffixes(desk, monkeypatch, capsys, override):
    monkeypatch.chdir(desk)
    assert main(["plan", "tiny.yaml", override, "--resolved"]) == 0
    assert {"10k": "10000", "1e4": "10000", "30min": "1800.0", "80GB": "80000000000"}[
        override.partition("=")[2]
    ] in capsys.readouterr().out


@pytest.mark.parametrize("name", TAKEN_RECIPES)
def test_recipes_from_other_editors_are_read_correctly(desk, monkeypatch, capsys, name):
    monkeypatch.chdir(desk)
    (desk / "recipe.yaml").write_bytes(TAKEN_RECIPES[name])
    said = []
    for recipe in ("recipe.yaml", "tiny.yaml"):
        assert main(["plan", recipe, "--resolved"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
