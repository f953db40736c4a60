"""Compare releases of torch and DeepSpeed: the same steps with every pair, and with plain torch, bit for bit.

    make versions                             install three releases of torch and four of DeepSpeed, and run this
    python -m benchmarks.versions FOLDER      every pair of FOLDER/torch-* (environments) and FOLDER/deepspeed-*

1. Each pair runs in its own process: the environment's Python, with the DeepSpeed folder first on its path.
2. Two workers over gloo train a small ViT for ten steps of two micro-batches, at every ZeRO stage in fp32, and at the
   stages that support it in bf16; then the engine check runs with the same settings.
3. Plain torch of the same release trains the same model in one process, without DeepSpeed. It adds the gradients of the
   four micro-batches in ZeRO's order: at ZeRO 0 and 1 each worker adds its own first, at ZeRO 2 and 3 the workers add
   each micro-batch first.
4. The losses of all steps and the weights after the last one must have the same bits.

Out: FOLDER/versions.json with one Outcome for each pair and case; a table of all pairs in the file, as Markdown
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

import models
from pipeline.engine.deepspeed import import_deepspeed
from pipeline.engine.engine import Engine
from pipeline.engine.settings import deepspeed_config
from pipeline.extras.engine_check import hook
from pipeline.identity import package_versions
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group

ROOT = Path(__file__).parents[1]
CASES = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)]  # precision, ZeRO
STEPS = 10
WORLD = 2
ACCUMULATION = 2
MICRO_BATCH = 4
CLASSES = 10
IMAGE_SIZE = 32
# Without clipping: the norm is summed in another order at each stage, so its last bits would differ. The engine check
# covers clipping.
OPTIM = OptimConfig(lr=1e-3, clip=0.0)
BUCKETS = 4  # buckets of gradients in a backward pass; models of more than 50 million parameters have several
MODEL = models.config_of("Ti/16", IMAGE_SIZE, CLASSES, depth=2)
LONGEST_ERROR = 400  # characters
LONGEST_LIST = 2  # differences
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Outcome:
    """The result of one case with one pair of releases."""

    torch: str
    deepspeed: str
    precision: str
    zero: int
    losses: list[str]  # mean loss of each step, in hexadecimal
    weights: str  # digest of the fp32 weights after the last step
    plain_losses: list[str]  # the same of plain torch
    plain_weights: str
    refused: list[str]  # the first differences found by the engine check
    error: str = ""  # the error, if the case cannot run

    @property
    def verdict(self) -> str:
        """Return the cell of the table."""
        if self.error:
            return "cannot run"
        if self.refused:
            return "refused"
        if (self.losses, self.weights) == (self.plain_losses, self.plain_weights):
            return "equal"
        return difference(self.losses, self.plain_losses)


def difference(losses: Sequence[str], expected: Sequence[str]) -> str:
    """Describe the first step with another loss, and the largest relative difference of all steps."""
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(losses, expected, strict=True)]
    differing = [step for step, (a, b) in enumerate(pairs, 1) if a != b]
    if not differing:
        return "equal losses, other weights"
    return f"from step {differing[0]}, up to {max(abs(a / b - 1) for a, b in pairs):.0e}"


# ------------------------------------------------------------------------------------------------ training


def small_vit() -> models.Model:
    """Return the model with a nonzero head: with zeros, the other layers get no gradient in the first step."""
    generator = torch.Generator().manual_seed(0)
    model = models.from_config(MODEL, generator)
    assert isinstance(model.head, nn.Linear)
    nn.init.normal_(model.head.weight, std=0.05, generator=generator)
    return model


def micro_batch(step: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Draw the images (b, 3, S, S) and classes (b,) of a worker's micro-batch."""
    generator = torch.Generator().manual_seed((step * WORLD + rank) * ACCUMULATION + number)
    images = torch.randn(MICRO_BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return images, torch.randint(CLASSES, (MICRO_BATCH,), generator=generator)


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of all bits of the weights."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + weights[name].detach().numpy().tobytes())
    return total.hexdigest()[:16]


def mean_text(total: float) -> str:
    """Return a step's mean loss in hexadecimal, from the sum over all micro-batches."""
    return (total / (WORLD * ACCUMULATION)).hex()


def train_plainly(process: int, folder: str, precision: str, zero: int) -> None:
    """Train in plain torch with this ZeRO stage's order of sums; write the losses and the digest of the weights."""
    model = small_vit()
    decayed = models.decayed_parameters(model)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model.to(dtype)
    groups = [
        {"params": [p for name, p in masters.items() if name in decayed], "weight_decay": OPTIM.weight_decay},
        {"params": [p for name, p in masters.items() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    losses = []
    for step in range(STEPS):
        total = 0.0
        parts: dict[tuple[int, int], list[Tensor]] = {}  # (rank, number) → gradients
        for rank in range(WORLD):
            for number in range(ACCUMULATION):
                images, classes = micro_batch(step, rank, number)
                loss = F.cross_entropy(model(images.to(dtype)).float(), classes)
                total += loss.item()
                gradients = torch.autograd.grad(loss / ACCUMULATION, list(model.parameters()))
                parts[rank, number] = [gradient.float() / WORLD for gradient in gradients]
        a, b, c, d = parts.values()
        if zero >= 2:
            b, c = c, b
        sums = [(w + x) + (y + z) for w, x, y, z in zip(a, b, c, d, strict=True)]
        for p, gradient in zip(masters.values(), sums, strict=True):
            p.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        losses.append(mean_text(total))
    write(folder, process, {"plain_losses": losses, "plain_weights": digest_of(masters)})


def train(rank: int, folder: str, precision: str, zero: int) -> None:
    """Train with our engine as one of the workers, and check the engine; write the results, or the error."""
    try:
        write(folder, rank, results_of_worker(rank, folder, precision, zero))
    except Exception as error:
        write(folder, rank, {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]})
        raise


def results_of_worker(rank: int, folder: str, precision: str, zero: int) -> dict[str, Any]:
    """Collective: train, and check the engine; return the results."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    device = join_group(TIMEOUT_S)
    settings = deepspeed_config(
        zero=zero,
        precision=precision,
        micro_batch=MICRO_BATCH,
        accumulation=ACCUMULATION,
        clip=OPTIM.clip,
        user_file=None,
    )
    model = small_vit()
    elements = sum(p.numel() for p in model.parameters())
    settings["zero_optimization"]["reduce_bucket_size"] = elements // BUCKETS
    engine = Engine(model, models.decayed_parameters(model), OPTIM, settings)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(ACCUMULATION):
            images, classes = micro_batch(step, dist.get_rank(), number)
            loss = F.cross_entropy(engine.forward(images.to(engine.dtype)).float(), classes)
            engine.backward(loss)
            engine.end_micro_batch(OPTIM.lr)
            total += loss.item()
        dist.all_reduce(total)
        losses.append(mean_text(total.item()))
    # Each element has one owner, so that the sum over the workers is a copy.
    weights = {name: torch.zeros(count) for name, count in engine.sizes.items()}
    for fragment in engine.fragments(("master",)):
        master = fragment.tensors["master"].detach()
        weights[fragment.name][fragment.start : fragment.start + len(master)] = master
    for whole in weights.values():
        dist.all_reduce(whole)
    engine.close()

    cfg: Any = SimpleNamespace(
        zero=zero, precision=precision, exact_parts=0, checkpoint_blocks=0, deepspeed=None, optim=OPTIM
    )
    refused = hook.check(cfg, MODEL, device)[:LONGEST_LIST]
    dist.barrier()
    dist.destroy_process_group()
    return {"losses": losses, "weights": digest_of(weights), "refused": refused}


def write(folder: str, rank: int, values: dict[str, Any]) -> None:
    """Write the values of a process where `run` reads them."""
    (Path(folder) / f"{rank}.json").write_text(json.dumps(values))


def run(function: Callable[..., None], world: int, precision: str, zero: int) -> dict[str, Any]:
    """Run the function in `world` forked processes; return what rank 0 wrote, or the error of the first that failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(function, (folder, precision, zero), world, start_method="fork")
        except ProcessException as error:
            path = Path(folder) / f"{error.error_index}.json"
            if not path.exists():  # killed by a signal
                return {"error": str(error)}
            values = json.loads(path.read_text())
            return {"error": values.get("error", str(error))}
        return dict(json.loads((Path(folder) / "0.json").read_text()))


def outcomes() -> Iterator[Outcome]:
    """Run every case with the installed releases."""
    torch.set_num_threads(1)
    versions = package_versions()
    import_error = ""
    try:
        import_deepspeed()  # once, before the forks
    except Exception as error:
        import_error = f"{type(error).__name__}: {error}"
    for precision, zero in CASES:
        values: dict[str, Any] = {"losses": [], "weights": "", "refused": [], "error": import_error}
        values |= run(train_plainly, 1, precision, zero)
        if not import_error:
            values |= run(train, WORLD, precision, zero)
        yield Outcome(versions["torch"], versions["deepspeed"], precision, zero, **values)


# ------------------------------------------------------------------------------------------------ the table


def table(results: Sequence[Outcome]) -> str:
    """Return the Markdown table of all pairs, and what the engine check and the errors say."""
    heads = [f"{precision} ZeRO {zero}" for precision, zero in CASES]
    lines = ["| torch | DeepSpeed | " + " | ".join(heads) + " |", "|---" * (len(CASES) + 2) + "|"]
    rows: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    reasons: dict[str, None] = {}
    for outcome in results:
        row = rows.setdefault((outcome.torch, outcome.deepspeed), {})
        row[outcome.precision, outcome.zero] = outcome.verdict
        reason = outcome.error or "; ".join(outcome.refused[:1])
        if reason:
            pair = f"torch {outcome.torch}, DeepSpeed {outcome.deepspeed}, {outcome.precision} ZeRO {outcome.zero}"
            reasons[f"- {pair}: {outcome.verdict}: {' '.join(reason.split())}"] = None
    for (torch_version, deepspeed), row in rows.items():
        cells = [row.get(case, "not run") for case in CASES]
        lines.append(f"| {torch_version} | {deepspeed} | " + " | ".join(cells) + " |")

    # Between releases of torch: plain torch alone, which has the same bits for all DeepSpeed releases.
    plain: dict[tuple[str, int], dict[str, list[str]]] = {}  # case → torch → losses
    for outcome in results:
        plain.setdefault((outcome.precision, outcome.zero), {})[outcome.torch] = outcome.plain_losses
    between: dict[str, None] = {}
    for (precision, _), losses in plain.items():
        first, *others = losses
        for other in others:
            found = difference(losses[other], losses[first])
            between[f"- plain torch {other} and {first} in {precision}: {found}"] = None
    return "\n".join([*lines, "", *reasons, "", *between])


def pairs_in(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Return the name of each pair, such as "2.13=0.19.8", its Python and its DeepSpeed folder."""
    for environment in sorted(folder.glob("torch-*")):
        for deepspeed in sorted(folder.glob("deepspeed-*")):
            name = f"{environment.name.removeprefix('torch-')}={deepspeed.name.removeprefix('deepspeed-')}"
            yield name, environment / "bin" / "python", deepspeed


def run_pair(python: Path, deepspeed: Path | None) -> list[Outcome]:
    """Run every case in a new process with this Python, and with its own or another DeepSpeed."""
    environment = dict(os.environ)
    if deepspeed is not None:
        environment["PYTHONPATH"] = str(deepspeed.resolve())
    command = [str(python.absolute()), "-m", "benchmarks.versions", "--here"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Outcome(**line) for line in json.loads(done.stdout.splitlines()[-1])]


def read_results(path: Path) -> list[Outcome]:
    """Read a file with the results of earlier runs."""
    return [Outcome(**line) for line in json.loads(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder with torch-* and deepspeed-*")
    parser.add_argument("--here", action="store_true", help="run the installed pair, and print its results as JSON")
    parser.add_argument("--only", nargs="*", help="run only these pairs, such as 2.13=0.19.8; none: print the table")
    options = parser.parse_args()
    if options.here:
        print(json.dumps([asdict(outcome) for outcome in outcomes()]))
        return
    output = options.folder / "versions.json"
    results = read_results(output) if output.exists() else []
    for name, python, deepspeed in pairs_in(options.folder):
        if options.only is not None and name not in options.only:
            continue
        print(name, file=sys.stderr, flush=True)
        new = run_pair(python, deepspeed)
        pair = (new[0].torch, new[0].deepspeed)
        results = [outcome for outcome in results if (outcome.torch, outcome.deepspeed) != pair]
        results += new
        output.write_text(json.dumps([asdict(outcome) for outcome in results], indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    # Workers import their function from this module, by its name.
    from benchmarks.versions import main as program

    program()
