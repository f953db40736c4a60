"""Compare the accuracy of `jobs new` and `jobs run` with that of timm's default train.py after equal CPU time.

    python -m benchmarks.first_hour pytorch-image-models/train.py --python TIMM-VENV/bin/python --minutes 10

train.py must be from the release of timm in the other environment, with validate.py next to it. Both sides use the
same train and test parts of three sets:
- photographs: 300 images from ImageNet-1k in two classes, animals (ids 0 to 397) and things, a fifth of each held out;
- cifar10: 10,000 and 2,000 images, which ours reads as tars and train.py as class folders;
- digits: UCI's 1,797 handwritten digits, at 32 px.

1. Ours runs the recipe of `jobs new --minutes M` to its end. The CPU seconds of all its processes count, including
   inspecting the images, packing, startup and evaluation.
2. train.py is stopped after the same CPU seconds. Its defaults are a ResNet-50 at 224 px, 300 epochs, and batches of
   128. Apart from the number of classes and the device, it only gets an option to save a checkpoint at every step,
   because otherwise there would be none.
3. validate.py evaluates the newest checkpoint; its time does not count.
Both use the first two cores of the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.extras.sources.samples import Sample, digits
from data.extras.sources.tars import tars

ROOT = Path(__file__).parents[1]
ANIMALS = 398  # the first classes of ImageNet-1k, which are animals
RECOVERY_STEPS = "1"  # steps between checkpoints of train.py; a step takes half a minute of CPU time


def write_folders(samples: Iterable[Sample], folder: Path, names: list[str]) -> None:
    """Write images to one folder per class."""
    for number, sample in enumerate(samples):
        assert sample.labels
        path = folder / names[sample.labels[0]] / f"{number:05d}.{sample.extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.read())


def make_photographs(images: Path, folder: Path) -> None:
    """Write the photographs as two classes, animals and things, with every fifth image for validation."""
    parts: dict[str, list[Sample]] = {"train": [], "validation": []}
    seen = [0, 0]
    for sample in tars(f"{images}/imagenet1k-*.tar"):
        assert sample.labels is not None
        label = int(sample.labels[0] >= ANIMALS)
        seen[label] += 1
        part = "validation" if seen[label] % 5 == 0 else "train"
        parts[part].append(Sample(sample.key, sample.image, (label,), sample.extension))
    for part, samples in parts.items():
        write_folders(samples, folder / part, ["animal", "thing"])


def cpu_seconds(command: list[str], folder: Path, limit_s: float | None = None) -> float:
    """Run a command, stop it after `limit_s` CPU seconds, and return the CPU seconds of all its processes."""
    seconds: dict[int, float] = {}
    with (
        open(folder / "log.txt", "a") as log,
        psutil.Popen(command, cwd=folder, stdout=log, stderr=log) as main,
    ):
        while main.poll() is None:
            time.sleep(0.2)
            try:
                processes = [main, *main.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in processes:
                try:
                    times = process.cpu_times()
                    seconds[process.pid] = times.user + times.system
                except psutil.NoSuchProcess:
                    continue
            if limit_s is not None and sum(seconds.values()) >= limit_s:
                for process in processes:
                    process.kill()
    if main.returncode != 0 and limit_s is None:
        raise SystemExit(f"{' '.join(command)} ended with {main.returncode}: see {folder / 'log.txt'}")
    return sum(seconds.values())


def ours(place: str, folder: Path, minutes: float) -> tuple[float, float]:
    """Return the accuracy that `jobs new` and `jobs run` reach, and the CPU seconds that they use."""
    folder.mkdir()
    jobs = [sys.executable, str(ROOT / "jobs" / "__main__.py")]
    seconds = cpu_seconds([*jobs, "new", place, "--output", "recipe.yaml", "--minutes", str(minutes)], folder)
    seconds += cpu_seconds([*jobs, "run", "recipe.yaml"], folder)
    (done,) = folder.glob("runs/*/pretrain-*/done.json")
    return json.loads(done.read_text())["metrics"]["accuracy"], seconds


def theirs(train_py: Path, python: str, images: Path, folder: Path, limit_s: float) -> tuple[str, float]:
    """Return the accuracy and the CPU seconds of train.py, which is stopped after `limit_s` CPU seconds."""
    folder.mkdir()
    classes = str(len(list((images / "train").iterdir())))
    common = ["--data-dir", str(images), "--num-classes", classes, "--device", "cpu"]
    command = [python, str(train_py), *common, "--output", str(folder), "--recovery-interval", RECOVERY_STEPS]
    seconds = cpu_seconds(command, folder, limit_s)
    checkpoints = sorted(folder.rglob("*.pth.tar"), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        return "no checkpoint", seconds
    result = folder / "validation.json"
    command = [python, str(train_py.with_name("validate.py")), *common, "--model", "resnet50", "--checkpoint"]
    command += [str(checkpoints[-1]), "--results-file", str(result), "--results-format", "json"]
    with open(folder / "log.txt", "a") as log:
        subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=True)
    return f"{json.loads(result.read_text())['top1']:.1f}%", seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("train_py", type=Path)
    parser.add_argument(
        "--python", type=os.path.abspath, required=True, help="interpreter of the environment with timm"
    )
    parser.add_argument("--images", type=Path, default=ROOT.parent / "shared" / "images")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sets", nargs="+", default=["photographs", "cifar10", "digits"])
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    images = arguments.images.resolve()
    print(f"in {folder}\n| set | ours | CPU s | timm's train.py | CPU s |\n|---|--:|--:|--:|--:|")
    for name in arguments.sets:
        place = str(folder / name)
        if name == "photographs":
            make_photographs(images, folder / name)
        elif name == "cifar10":
            place = f"{images}/cifar10-*.tar"  # `new` uses its test part for evaluation
        for part, train in (("train", True), ("validation", False)):
            if name == "cifar10":
                source = tars(f"{images}/cifar10-{'train' if train else 'test'}-*.tar")
                write_folders(source, folder / name / part, [str(label) for label in range(10)])
            elif name == "digits":
                write_folders(digits(train=train), folder / name / part, [str(label) for label in range(10)])
        accuracy, seconds = ours(place, folder / f"{name}-ours", arguments.minutes)
        other, other_seconds = theirs(
            arguments.train_py.resolve(), arguments.python, folder / name, folder / f"{name}-timm", seconds
        )
        print(f"| {name} | {accuracy:.1%} | {seconds:.0f} | {other} | {other_seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
