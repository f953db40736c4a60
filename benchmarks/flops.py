"""Measure few-shot accuracy against training FLOPs, with token dropping and with smaller images first.

    python -m benchmarks.flops --images FOLDER [--seeds 0 1 2] [--run runs/flops]

FOLDER contains CIFAR-10 as WebDataset tars, cifar10-train-*.tar and cifar10-test-*.tar. `jobs run` pretrains a small
ViT on it once per row and seed, and the closed-form few-shot probe evaluates its features at the end. One row saves
FLOPs by training for fewer steps; token dropping is useful only if it beats this row. Finished runs are skipped, so the
command can be interrupted and repeated, also with more seeds.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs.__main__ import KINDS
from jobs.kinds import load_kinds
from jobs.recipe import campaign
from jobs.resolved_recipe import Campaign, Stage
from jobs.run.session import run_campaign
from pipeline.training_config import flops_of
from pipeline.training_data import steps_of

TRAINED_IMAGES = 10_000
SHOTS = (10, 25)
ROWS = {
    "whole images": "{}",
    "16 px up to 0.75 of 1.4 × the steps": "{passes: 7, thinning: {image_sizes: [16], image_sizes_until: [0.75]}}",
    "16 px up to 0.6 of the steps": "{thinning: {image_sizes: [16], image_sizes_until: [0.6]}}",
    "half of the patches up to 0.9 of the steps": "{thinning: {patch_dropout: 0.5, patch_dropout_until: 0.9}}",
    "whole images, 0.55 of the steps": "{passes: 2.75}",
}
RECIPE = """
run: {run}
cluster: {{workers: 1, backend: processes}}

shards:
  kind: pack
  sets:
    train: {{source: tars, path: {images}/cifar10-train-*.tar}}
    test: {{source: tars, path: {images}/cifar10-test-*.tar}}

pretrain:
  data: {{train: "@shards/train", augment: {{min_area: 0.3}}}}
  model: {{name: mu/4, width: 96, depth: 4, mlp: 192, heads: 3, image_size: 32, classes: 10}}
  optim: {{lr: 2.0e-3, weight_decay: 0.05, schedule: {{warmup_steps: 50}}}}
  loss: softmax
  passes: 5
  batch_size: 64
  micro_batch: 64
  precision: fp32
  save_every: 100
  probe: {{train: "@shards/train", test: "@shards/test", shots: [10, 25], seeds: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}}
"""


def load(options: argparse.Namespace, row: str, seed: int) -> tuple[Campaign, Stage]:
    """Return the campaign of one row and seed; all campaigns share one run directory."""
    path = Path(options.run) / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECIPE.format(run=Path(options.run).resolve(), images=Path(options.images).resolve()))
    loaded = campaign.load(path, [f"pretrain.seed={seed}", *overrides_of(ROWS[row])], load_kinds(KINDS))
    return loaded, loaded.stage("pretrain")


def overrides_of(fields: str) -> list[str]:
    """Convert text such as "{a: {b: 1}}" to overrides of the section."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.create(fields))
    assert isinstance(values, dict)
    return [f"pretrain.{name}={json.dumps(value)}" for name, value in values.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True)
    parser.add_argument("--run", default="runs/flops")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    options = parser.parse_args()

    flops: dict[str, int] = {}
    accuracy: dict[tuple[str, int], list[float]] = {}  # (row, shots) → accuracy of each seed
    # Iterate over seeds first, so that all rows have the same number of seeds after an interruption.
    for seed in options.seeds:
        for row in options.rows:
            loaded, stage = load(options, row, seed)
            run_campaign(loaded)
            result = json.loads((loaded.directory(stage) / "done.json").read_text())
            for shots in SHOTS:
                accuracy.setdefault((row, shots), []).append(100 * metrics_of(result)[f"{shots}shot"])
            steps = steps_of(stage.config, TRAINED_IMAGES)
            phases = stage.config.phases(steps, stage.model)
            flops[row] = flops_of(phases, stage.model, range(steps), stage.config.batch_size)

    first = options.rows[0]
    headings = [f"{shots}-shot % | difference, pairs of seeds" for shots in SHOTS]
    print(f"\n| trained on | exaFLOPs | × | {' | '.join(headings)} |\n|---|--:|--:|{'--:|--:|' * len(SHOTS)}")
    for row in options.rows:
        cells = [row, f"{flops[row] / 1e18:.3g}", f"{flops[row] / flops[first]:.2f}"]
        for shots in SHOTS:
            values = accuracy[row, shots]
            differences = [value - base for value, base in zip(values, accuracy[first, shots], strict=True)]
            cells += [with_error(values), with_error(differences, "+")]
        print(f"| {' | '.join(cells)} |")


def metrics_of(result: dict) -> dict[str, float]:
    """Return the metrics in a done.json."""
    return result["outcome"]["metrics"] if "outcome" in result else result["metrics"]


def with_error(values: list[float], sign: str = "") -> str:
    """Format the mean ± the standard deviation."""
    mean = f"{statistics.mean(values):{sign}.2f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    main()
