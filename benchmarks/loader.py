"""From shards to batches of 224-pixel crops: images per CPU-second of this loader and of others.

    python benchmarks/loader.py --shards FOLDER [--python OTHER/bin/python] [--rounds 5] [--images 1500] [--only …]

1. Every contender runs by itself, in a fresh process, with two decoding processes or threads unless its name says
   otherwise; all of them once a round, in an order that is rotated from round to round.
2. The first 300 images are not timed. CPU-seconds are those of the process and of all its children.
3. The table has medians, and of the ratios to the base the median of those within a round.

What the contenders do: contenders.py. Rows that begin with "limit" load nothing: they are what a part of decoding takes
alone (decode.py), in the same rounds. `--python` names an interpreter that has what this one lacks (tensorflow,
torchvision, DALI), and OpenCV, Pillow, psutil and xxhash for the boxes, the tars and the clock; a contender that cannot
run is left out, by name. Decoding alone: decode.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.contenders import BATCH, CONTENDERS

WARM_UP = 300  # images
BASE = "tf.data, TFRecord, decode and crop"
Rates = dict[str, list[float]]  # contender → images per CPU-second, of every round


def tree_cpu_s() -> float:
    """CPU-seconds of this process and its living children."""
    import psutil

    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [here, *here.children(recursive=True)])


def measure(name: str, shards: list[str], folder: str, images: int) -> float:
    """Images per CPU-second of one contender, run here."""
    batches = CONTENDERS[name].batches(shards, folder)
    for _ in range(WARM_UP // BATCH):
        next(batches)
    start = tree_cpu_s()
    for _ in range(images // BATCH):
        next(batches)
    return images // BATCH * BATCH / (tree_cpu_s() - start)


def interpreter_of(name: str, other: str) -> str | None:
    """The Python that has what a contender needs: this one, the other one, or None."""
    needs = CONTENDERS[name].needs
    if all(importlib.util.find_spec(module.partition(".")[0]) for module in needs):
        return sys.executable
    missing = f"import importlib.util as u; exit(any(u.find_spec(m.partition('.')[0]) is None for m in {needs!r}))"
    return other if subprocess.run([other, "-c", missing]).returncode == 0 else None


def run_rounds(args: argparse.Namespace, folder: str) -> Rates:
    """Run every contender once a round, in turn."""
    interpreters = {}
    for name in CONTENDERS:
        wanted = not args.only or any(part in name for part in args.only)
        interpreter = interpreter_of(name, args.python) if wanted else None
        if interpreter is not None:
            interpreters[name] = interpreter
        elif wanted:
            print(f"left out: {name}: needs {', '.join(CONTENDERS[name].needs)}; name a --python that has it")

    # What TensorFlow says of itself at every start, and threads of other libraries, are turned off.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    options = ["--shards", args.shards, "--images", str(args.images), "--folder", folder]
    rates: Rates = {}
    names = list(interpreters)
    for turn in range(args.rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            command = [interpreters[name], __file__, "--measure", name, *options]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                print(f"left out: {name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                continue
            rates.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
    return rates


def print_table(rates: Rates, base: str) -> None:
    """Print the medians, fastest first, as rows of a Markdown table."""
    print(f"| | images per CPU-second (least … most) | × {base} (least … most) |\n|---|--:|--:|")
    for name in sorted(rates, key=lambda name: -statistics.median(rates[name])):
        mine = rates[name]
        middle = f"{statistics.median(mine):,.0f} ({min(mine):,.0f} … {max(mine):,.0f})"
        # A machine's other work changes from round to round, and less within one.
        ratios = [mine_now / base_now for mine_now, base_now in zip(mine, rates[base], strict=False)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
        print(f"| {name} | {middle} | {ratio} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, help="folder of imagenet*.tar")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has what this one lacks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=1500, help="that are timed of each contender in each round")
    parser.add_argument("--only", nargs="+", help="contenders whose names have one of these parts")
    parser.add_argument("--measure", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        shards = sorted(str(path) for path in Path(args.shards).glob("imagenet*.tar"))
        print(json.dumps(measure(args.measure, shards, args.folder, args.images)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rates = run_rounds(args, folder)
    if rates:
        print_table(rates, BASE if BASE in rates else next(iter(rates)))


if __name__ == "__main__":
    main()
