"""Measure the inference speed of models and the largest batch that fits (paper, figures 12 and 13).

    python benchmarks/speed.py --output runs/speed                                                # on one GPU, an hour
    python benchmarks/speed.py --output runs/speed --models mu/8 Axial-mu/8 BiT-R50x1 --sizes 32 64 128 \
        --classes 10 --batches 8 --most-batch 512 --seconds 0.5 --memory-gb 0.25 --precision fp32     # on a laptop

1. The largest batch is found by doubling until memory runs out, and then by bisection to a precision of an eighth. The
   search ends at --most-batch. On a CPU, the process is limited to --memory-gb, because other programs need the rest.
2. Each size in --batches that fits is timed for --seconds after a warm-up, and the best rate counts. The images and the
   weights are random, which does not affect the results.
3. speed.csv has one line per model and image size; images_per_s.svg and largest_batch.svg plot them over image size.

The paper's numbers are from a TPUv3 core: compare the shapes of the curves, not their values. A patch size of 14 does
not divide all image sizes.
"""

import argparse
import csv
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import models
from jobs.extras.studies.chart import write_study_chart
from models import ModelConfig
from pipeline.process_group import processor

GIB = 2**30
MODELS = (
    *("B/32", "B/16", "L/32", "L/16", "H/14"),
    *("BiT-R50x1", "BiT-R50x2", "BiT-R152x2", "BiT-R200x3", "Axial-B/32", "Axial-B/16"),
)
SIZES = (64, 128, 224, 384, 512)
SIZES_OF_14 = (70, 126, 224, 378, 518)
COLUMNS = ("model", "image_size", "images_per_s", "largest_batch", "hardware")


def main(words: Sequence[str] | None = None) -> None:
    """Measure all models and sizes; write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="folder for the table and the figures")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--sizes", nargs="+", type=int, help="image sizes in pixels")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 64, 512))
    parser.add_argument("--most-batch", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of timing for each batch size")
    parser.add_argument(
        "--memory-gb", type=float, default=4.0, help="memory limit of the process on a CPU, above its current use"
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    options = parser.parse_args(words)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in measured(options):
        rows.append(row)
        print("  ".join(f"{name} {row[name]}" for name in COLUMNS), flush=True)
    with open(options.output / "speed.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    for y, title in (("images_per_s", "Images per second"), ("largest_batch", "Largest batch that fits")):
        folder = options.output / y
        folder.mkdir(exist_ok=True)
        write_study_chart(figure_of(rows, y, title), folder / "figure")
        (folder / "figure.svg").replace(options.output / f"{y}.svg")


def measured(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the measurements of each model and image size."""
    device = torch.device("cpu")
    hardware = f"{processor()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.device("cuda")
        hardware = torch.cuda.get_device_name(device)
    for name in options.models:
        for size in options.sizes or (SIZES_OF_14 if name.endswith("/14") else SIZES):
            architecture = models.config_of(name, size, options.classes)
            rate, largest = speed_of(architecture, device, options)
            yield dict(zip(COLUMNS, (name, size, round(rate, 1), largest, hardware), strict=True))


def speed_of(architecture: ModelConfig, device: torch.device, options: argparse.Namespace) -> tuple[float, int]:
    """Return the images per second of a model, and its largest batch; both are 0 if not even one image fits."""
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model = models.from_config(architecture).to(device, dtype).eval()

    def forward(batch: int) -> None:
        with torch.inference_mode():
            model(torch.zeros(batch, 3, *architecture.image_size, device=device, dtype=dtype))
        if device.type == "cuda":
            torch.cuda.synchronize()

    largest = largest_batch(partial(fits, forward, options.memory_gb, device.type), options.most_batch)
    rates = [0.0]
    for batch in options.batches:
        if batch > largest:
            continue
        forward(batch)
        images = 0
        began = time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            forward(batch)
            images += batch
        rates.append(images / (time.perf_counter() - began))
    return max(rates), largest


def fits(forward: Callable[[int], None], memory_gb: float, device: str, batch: int) -> bool:
    """Return whether a batch fits; on a CPU, a memory limit raises an error before the kernel kills the process."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if device == "cpu":
        # The limit applies to VmData.
        held = 0
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                held = 1024 * int(line.split()[1])
        resource.setrlimit(resource.RLIMIT_DATA, (held + int(memory_gb * GIB), before[1]))
    try:
        forward(batch)
        return True
    except (torch.OutOfMemoryError, MemoryError):
        return False
    except RuntimeError as error:
        # On a CPU torch's allocator raises only a RuntimeError with one of these messages.
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        if device == "cuda":
            torch.cuda.empty_cache()


def largest_batch(is_possible: Callable[[int], bool], most: int) -> int:
    """Return the largest possible batch up to `most`, to a precision of an eighth; 0 if not even one image fits."""
    low, high = 0, 1
    while low < most and is_possible(high):
        low, high = high, min(2 * high, most)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        if is_possible(middle):
            low = middle
        else:
            high = middle
    return low


def figure_of(rows: Sequence[dict[str, object]], y: str, title: str) -> dict[str, object]:
    """Return a figure of one column against the image size, with a line per model (jobs/extras/studies/figure.py)."""
    points = []
    for row in rows:
        value = float(str(row[y]))
        if value > 0:
            point = {"series": row["model"], "row": f"{row['model']}, {row['image_size']}", "x": row["image_size"]}
            points.append({**point, "y": value, "low": value, "high": value, "runs": 1, "axes": {}})
    return {
        "title": title,
        "x": "image_size",
        "y": y,
        "log": ["x", "y"],
        "stamp": str(rows[0]["hardware"]),
        "is_curve": False,
        "is_share": False,
        "points": points,
    }


if __name__ == "__main__":
    main()
