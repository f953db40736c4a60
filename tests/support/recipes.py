"""The campaigns of many tests: all stages in seconds, pretraining for the fault tests, and four steps."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_CHECK = "  check_engine: false\n"


def without_check(recipe: str) -> str:
    """Turn the engine check of the trained stages off: it takes half a second, as long as many steps of these runs."""
    if not (ROOT / "jobs" / "extras" / "engine_check.py").exists():
        return recipe
    return recipe.replace("  precision: fp32\n", f"  precision: fp32\n{NO_CHECK}")


# All stages, on existing shards (the fixture `shards`): TINY.format(run=folder / "run", shards=shards).
TINY = without_check("""
run: {run}
cluster: {{workers: 2, backend: processes, backoff_s: 0}}
pretrain:
  data: {{train: {shards}/train, evaluate: {shards}/test, augment: {{min_area: 0.7, flip: false}}}}
  model: {{name: mu/8, image_size: 16, classes: 10, dropout: 0.1}}
  optim: {{lr: 2.0e-3, schedule: {{warmup_steps: 5}}}}
  loss: softmax
  steps: 24
  batch_size: 16
  micro_batch: 4
  precision: fp32
  log_every: 4
  save_every: 8
resize: {{init: "@pretrain", image_size: 24}}
finetune:
  init: "@resize"
  data: {{train: {shards}/train}}
  model: {{classes: 10}}
  optim: {{lr: 0.05, schedule: {{warmup_steps: 2}}}}
  steps: 4
  batch_size: 16
  micro_batch: 8
  precision: fp32
  zero: 0
fewshot: {{init: "@resize", probe: {{train: {shards}/train, test: {shards}/test, shots: [1]}}}}
""")

# It packs its shards itself, and is started as `jobs run SMALL run=FOLDER` (tests/support/drives.py,
# tests/support/ray_hosts.py).
SMALL = without_check("""
cluster: {workers: 2, backend: processes, backoff_s: 0.1}
shards: {kind: pack, shard_samples: 100, sets: {train: {source: digits, split: train, image_size: 16}}}
pretrain:
  data: {train: "@shards/train"}
  model: {name: mu/8, width: 16, depth: 2, mlp: 32, heads: 2, image_size: 16, classes: 10}
  optim: {lr: 1.0e-3, schedule: {warmup_steps: 5}}
  loss: softmax
  steps: 40
  passes: null
  batch_size: 16
  micro_batch: 4
  precision: fp32
  zero: 2
  log_every: 4
  save_every: 5
""")

# One worker pretrains for four steps: SHORT.format(data="train: shards/train").
SHORT = without_check("""
run: runs/small
cluster: {{workers: 1, backend: processes, backoff_s: 0.1}}
pretrain:
  data: {{{data}}}
  model: {{name: mu/8, width: 16, depth: 2, mlp: 32, heads: 2, image_size: 16, classes: 10}}
  optim: {{lr: 1.0e-3, schedule: {{warmup_steps: 1}}}}
  loss: softmax
  steps: 4
  batch_size: 16
  micro_batch: 16
  precision: fp32
  log_every: 1
  save_every: 2
""")
