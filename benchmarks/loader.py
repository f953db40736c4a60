"""Compare data loaders, from shards to batches of 224-pixel crops, in images per CPU-second.

    python benchmarks/loader.py --shards FOLDER [--python OTHER/bin/python] [--rounds 40] [--images 640] [--only …]

1. Each contender has a separate process, with two decoding processes or threads unless its name says otherwise. It
   starts, returns 300 untimed images, fills its prefetch buffers, and then waits for its turn.
2. The contenders run in short turns, in an order that rotates between rounds, so that other load on the machine affects
   all of them equally. A turn ends when the prefetch buffers are full again, so the number of returned images equals
   the number of decoded images.
3. CPU-seconds include the process and all its children. The table shows medians, and for the per-round ratios to the
   base their median, its 95 % interval, and the extremes.

contenders.py contains the contenders. Rows that begin with "limit" do not load anything: they time only a part of
decoding (decode.py), or the minimum work of any loader. `--python` is an interpreter with the libraries missing here
(tensorflow, torchvision, DALI); it also needs OpenCV, Pillow, psutil and xxhash. A contender that cannot run is skipped
and named. decode.py measures only the decoding.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.contenders import BATCH, CONTENDERS

WARM_UP = 300  # number of images before timing begins
IDLE_AFTER_S = 0.2  # the prefetch buffers of a contender are full after this time without CPU use
BASE = "tf.data, TFRecord, decode and crop"
Rates = dict[str, list[float]]  # contender → images per CPU-second in each round


def tree_cpu_s() -> float:
    """Return the CPU-seconds of this process and its running children."""
    import psutil

    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [here, *here.children(recursive=True)])


def serve(name: str, shards: list[str], folder: str, images: int) -> None:
    """For each input line, load some images, and print the images per CPU-second."""
    batches = CONTENDERS[name].batches(shards, folder)
    for _ in range(-(-WARM_UP // BATCH)):
        next(batches)
    time.sleep(IDLE_AFTER_S)
    print("ready", flush=True)
    turns = images // BATCH
    for _ in sys.stdin:
        start = tree_cpu_s()
        for _ in range(turns):
            next(batches)
        time.sleep(IDLE_AFTER_S)
        print(turns * BATCH / (tree_cpu_s() - start), flush=True)


def interpreter_of(name: str, other: str) -> str | None:
    """Return the Python interpreter that has a contender's modules: this one, the other one, or None."""
    needs = CONTENDERS[name].needs
    if all(importlib.util.find_spec(module.partition(".")[0]) for module in needs):
        return sys.executable
    missing = f"import importlib.util as u; exit(any(u.find_spec(m.partition('.')[0]) is None for m in {needs!r}))"
    return other if subprocess.run([other, "-c", missing]).returncode == 0 else None


def start(args: argparse.Namespace, folder: str) -> dict[str, subprocess.Popen[str]]:
    """Start the contenders that can run, and return their processes, which wait for their turns."""
    # Turn off TensorFlow's startup messages and the threads of other libraries.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    options = ["--shards", args.shards, "--images", str(args.images), "--folder", folder]
    pipe = subprocess.PIPE
    running = {}
    for name in CONTENDERS:
        if args.only and not any(part in name for part in args.only):
            continue
        interpreter = interpreter_of(name, args.python)
        if interpreter is None:
            print(f"skipped {name}: needs {', '.join(CONTENDERS[name].needs)}; pass --python with these modules")
            continue
        command = [interpreter, __file__, "--serve", name, *options]
        # Use a separate session, so that the contender can be killed together with its children.
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True)
        # Start them one after another, because some contenders write files that others read.
        if answer(child) == "ready":
            running[name] = child
        else:
            print(f"skipped {name}: it ended with exit code {child.wait()}", file=sys.stderr)
    return running


def answer(child: subprocess.Popen[str]) -> str:
    """Return a contender's next output line; "" if the contender has exited."""
    assert child.stdout is not None, "it is a pipe"
    return child.stdout.readline().strip()


def run_rounds(args: argparse.Namespace, folder: str) -> Rates:
    """Run each contender once per round."""
    running = start(args, folder)
    rates: Rates = {name: [] for name in running}
    names = list(running)
    for turn in range(args.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            child = running[name]
            assert child.stdin is not None, "it is a pipe"
            print(file=child.stdin, flush=True)
            rates[name].append(float(answer(child)))
    for child in running.values():
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return rates


def print_table(rates: Rates, base: str) -> None:
    """Print the medians, fastest first, as rows of a Markdown table."""
    print(f"| | images per CPU-second (least … most) | × {base} | 95 % | least … most |\n|---|--:|--:|--:|--:|")
    for name in sorted(rates, key=lambda name: -statistics.median(rates[name])):
        mine = rates[name]
        middle = f"{statistics.median(mine):,.0f} ({min(mine):,.0f} … {max(mine):,.0f})"
        # Other load on the machine varies between rounds, but less within a round.
        ratios = sorted(mine_now / base_now for mine_now, base_now in zip(mine, rates[base], strict=True))
        # The number of ratios below the median is binomial with p = 1/2: sign test, normal approximation.
        below = max(0, math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2))
        interval = f"{ratios[below]:.2f} … {ratios[-1 - below]:.2f}"
        extremes = f"{ratios[0]:.2f} … {ratios[-1]:.2f}"
        print(f"| {name} | {middle} | {statistics.median(ratios):.2f} | {interval} | {extremes} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, help="folder of imagenet*.tar")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the modules missing in this one")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--images", type=int, default=640, help="timed images per contender and round")
    parser.add_argument("--only", nargs="+", help="run contenders whose names contain one of these")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        shards = sorted(str(path) for path in Path(args.shards).glob("imagenet*.tar"))
        serve(args.serve, shards, args.folder, args.images)
        return
    with tempfile.TemporaryDirectory() as folder:
        rates = run_rounds(args, folder)
    if rates:
        print_table(rates, BASE if BASE in rates else next(iter(rates)))


if __name__ == "__main__":
    main()
