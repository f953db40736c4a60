"""Measure how much evaluations slow down training: on a spare worker, in the loop, and without evaluations.

    python benchmarks/async_evaluation.py [--rounds 5] [--steps 60] [--every 20] [--workers 1]

Each run is a complete `python -m jobs run` that trains the same steps on the digits with the processes backend; the
variants alternate. The time of a run comes from its training records after the first log line: it includes the time in
which steps waited for saves and evaluations, but not the startup and the evaluation of the last step. The evaluator
uses the cores that the workers leave free: without a free core, `spare` evaluates in the loop. The final weights of all
runs are compared too.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.monitoring.telemetry import read_metrics

ROOT = Path(__file__).parents[1]

RECIPE = """
cluster: {{workers: {workers}, backend: processes}}
shards:
  kind: pack
  shard_samples: 500
  sets:
    train: {{source: digits, split: train, image_size: 64}}
    test: {{source: digits, split: test, image_size: 64}}
pretrain:
  data: {{train: "@shards/train", evaluate: "@shards/test"}}
  model: {{name: mu/8, width: 128, depth: 4, mlp: 512, heads: 2, image_size: 64, classes: 10}}
  loss: softmax
  optim: {{lr: 1.0e-3, schedule: {{warmup_steps: 5}}}}
  steps: {steps}
  batch_size: 64
  micro_batch: {micro_batch}
  precision: fp32
  log_every: 5
  save_every: {every}
"""
WAYS = {
    "none": ("pretrain.evaluate_every=0",),
    "spare": ("pretrain.evaluate_on=spare",),
    "loop": ("pretrain.evaluate_on=training",),
}


def train(recipe: Path, run: Path, way: str, every: int) -> tuple[float, str, int]:
    """Train once; return the seconds after the first log line, the weights' sha256, and the spare evaluations."""
    overrides = [f"run={run}", f"pretrain.evaluate_every={every}", *WAYS[way]]
    command = [sys.executable, "-m", "jobs", "run", str(recipe), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment)
    (stage,) = run.glob("pretrain-*")
    records = [record for record in read_metrics(stage) if "seconds" in record and record["step"] > 5]
    beside = sum(record.get("where") == "spare" for record in read_metrics(stage, "evaluate"))
    weights = hashlib.sha256((stage / "weights.safetensors").read_bytes()).hexdigest()
    return sum(record["seconds"] for record in records), weights, beside


def main() -> None:
    """Print the training time of each variant, and its increase over training without evaluations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    weights = set()
    evaluations = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "recipe.yaml"
        micro_batch = 64 // options.workers // 2
        recipe.write_text(
            RECIPE.format(workers=options.workers, steps=options.steps, every=options.every, micro_batch=micro_batch)
        )
        for number in range(options.rounds):
            # Alternate the direction, so that a machine that slows down does not favour a variant.
            order = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
            for way in order:
                taken_s, digest, beside = train(recipe, folder / f"{way}-{number}", way, options.every)
                seconds[way].append(taken_s)
                weights.add(digest)
                evaluations += beside
    print(
        f"{options.workers} workers on {len(os.sched_getaffinity(0))} cores, {options.steps} steps, an evaluation and"
    )
    print(f"a commit every {options.every}, {options.rounds} rounds; {evaluations} evaluations ran on a spare worker;")
    print(f"weights of all runs: {', '.join(sorted(digest[:12] for digest in weights))}")
    print("| evaluations | median s | min | max | median increase over no evaluations |\n|---|---|---|---|---|")
    for way, taken in seconds.items():
        longer = statistics.median(taken[i] / seconds["none"][i] - 1 for i in range(options.rounds))
        print(f"| {way} | {statistics.median(taken):.2f} | {min(taken):.2f} | {max(taken):.2f} | {longer:+.1%} |")


if __name__ == "__main__":
    main()
