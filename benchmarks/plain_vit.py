"""Compare the plain ViT of two checkouts: the bits of its weights, logits and gradients, and the time of a step.

    git worktree add ../before COMMIT
    python -m benchmarks.plain_vit ../before [--model S/16] [--rounds 12]

Each round runs both checkouts in alternating order, one at a time, each in a separate process with one thread.
A step is a forward and a backward pass in float32. CPU time is measured, because other processes affect it less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURE = """
import hashlib, json, sys, time
import torch, models
torch.set_num_threads(1)
name, image_size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
generator = torch.Generator().manual_seed(0)
model = models.from_config(models.config_of(name, image_size), generator).train()
torch.nn.init.normal_(model.head.weight, generator=generator)
images = torch.randn(4, 3, image_size, image_size, generator=generator)
sums = {}
def digest(label, named):
    summed = hashlib.sha256()
    for key, tensor in named:
        summed.update(key.encode() + tensor.detach().numpy().tobytes())
    sums[label] = summed.hexdigest()[:16]
digest("weights", model.state_dict().items())
logits = model(images)
digest("logits", [("logits", logits)])
logits.square().mean().backward()
digest("gradients", [(key, value.grad) for key, value in model.named_parameters()])
seconds = []
for _ in range(steps):
    start = time.process_time()
    model(images).square().mean().backward()
    seconds.append(time.process_time() - start)
print(json.dumps({**sums, "seconds": min(seconds)}))
"""


def measure(checkout: Path, options: argparse.Namespace) -> dict[str, object]:
    """Run one measurement with the code of a checkout."""
    command = [sys.executable, "-c", MEASURE, options.model, str(options.image_size), str(options.steps)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="folder of the other checkout")
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=5, help="steps of a measurement, of which the fastest counts")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "now": ROOT}
    ratios = []
    for number in range(options.rounds):
        names = list(checkouts)
        if number % 2:
            names.reverse()
        results = {name: measure(checkouts[name], options) for name in names}
        for label in ("weights", "logits", "gradients"):
            before = results["before"][label]
            now = results["now"][label]
            if before != now:
                sys.exit(f"{label} differ: {before} before, {now} now")
        ratios.append(float(str(results["now"]["seconds"])) / float(str(results["before"]["seconds"])))
        print(f"round {number + 1}: now / before {ratios[-1]:.3f}", flush=True)
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"{options.model}: weights, logits and gradients are equal bit for bit in {options.rounds} rounds")
    print(f"time of a step, now / before: {quartiles[1]:.3f} (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})")


if __name__ == "__main__":
    main()
