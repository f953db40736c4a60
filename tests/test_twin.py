"""Training follows a run of the original code step by step, within the original's rounding errors.

`shared/golden/twin` holds 1,000 steps of pretraining (big_vision's update: sigmoid loss, Adam, decoupled decay on
kernels, clipping active on 979 steps, warm-up and linear decay) and 300 of fine-tuning (vit_jax: positions resized,
zero head, SGD with momentum, cosine), in float32 and float64, with tolerances measured from the original's own
float32 run and the effect of sixteen deliberate faults. It shares no code with `pipeline/`.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models
from data.errors import Preempted
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from models.extras.weights import npz
from pipeline import config
from pipeline.identity import code_version
from pipeline.monitoring.telemetry import read_metrics
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import DataConfig, TrainConfig
from pipeline.worker import Job
from tests.support import twin

TWIN = Path(__file__).parents[2] / "shared" / "golden" / "twin"
pytestmark = pytest.mark.skipif(not TWIN.is_dir(), reason="shared/golden/twin is not beside this checkout")

RANGES = (20, 100, 300, 1000)  # last steps of the ranges with separate tolerances

PRETRAIN = TrainConfig(
    loss="sigmoid",
    optim=OptimConfig(
        name="adam",
        lr=5e-4,
        weight_decay=1.0,  # big_vision's 0.0005 is not multiplied by the rate; torch's 1.0 × 0.0005 is
        clip=1.0,
        schedule=ScheduleConfig(decay="linear", warmup_steps=50, end=0.0),
    ),
    steps=1000,
    batch_size=64,
    micro_batch=64,
    precision="fp32",
    zero=0,
    log_every=10,
    save_every=1000,
)
FINETUNE = replace(
    PRETRAIN,
    loss="softmax",
    optim=OptimConfig(
        name="sgd",
        lr=0.01,
        weight_decay=0.0,
        clip=1.0,
        schedule=ScheduleConfig(decay="cosine", warmup_steps=50),
    ),
    steps=300,
    new_head=True,
    model={"representation": None, "classes": 10},
)


class Trace:
    """One phase of the stored run, "pre" or "ft": its inputs and results."""

    def __init__(self, phase: str) -> None:
        self.arrays = np.load(TWIN / "twin_A.npz")
        self.phase = phase
        self.measured = json.loads((TWIN / "twin_A.json").read_text())["measured"][phase]
        pool = np.load(TWIN / "twin_pool_A.npz")
        self.images: np.ndarray = pool["images"]
        self.labels: np.ndarray = pool["labels"]
        if phase == "ft":
            self.labels = self["labels"]
            enlarged = np.arange(48) * 32 // 48  # nearest neighbour, by the trace's integer rule
            self.images = self.images[:, enlarged][:, :, enlarged]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[f"{self.phase}/{name}"]

    def parameters(self, part: str, folder: Path) -> dict[str, torch.Tensor]:
        """Return the stored parameters "after_10" under our names."""
        prefix = f"{self.phase}/{part}/"
        stored = {key.removeprefix(prefix): self.arrays[key] for key in self.arrays.files if key.startswith(prefix)}
        path = folder / f"{part}.npz"
        np.savez(path, **stored)
        state, _ = npz.load(path, {})
        return state


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a packed set of two samples: an index is required, but the trace's loader does not read its samples."""
    folder = tmp_path_factory.mktemp("twin")
    png = bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
        "53de0000000c4944415408d763606060000000040001f61738550000000049454e44ae426082"
    )
    samples = [Sample(f"{number:03d}", png, (number % 10,), "png") for number in range(64)]
    pack(iter(samples), folder / "pool", name="pool", classes=10)
    return folder


def initial_weights(phase: str, folder: Path) -> Path:
    """Return a folder with a phase's initial weights; for fine-tuning they are resized by the stage itself."""
    start = "init" if phase == "pre" else "pretrained"
    model = models.load(TWIN / f"twin_A.{start}.ckpt.npz")
    target = folder / f"weights-{phase}"
    models.save_weights(model, target)
    if phase == "pre":
        return target
    state, source = models.load_weights(target)
    larger = replace(source, image_size=(48, 48))
    resized, _ = models.transfer(state, source, larger)
    models.save_weights(resized, folder / "resized", larger)
    return folder / "resized"


def follow(
    phase: str, pool: Path, folder: Path, *, steps: int, workers: int = 1, **changes: Any
) -> tuple[list[float], list[float], Path]:
    """Train on a trace's first steps; return losses and gradient norms of every step, and the stage's folder."""
    trace = Trace(phase)
    cfg = replace(PRETRAIN if phase == "pre" else FINETUNE, **changes)
    init = initial_weights(phase, folder)
    cfg = replace(cfg, init=str(init), data=DataConfig(train=str(pool / "pool")))
    stage = folder / "stage"
    (stage / "parameters").mkdir(parents=True)
    source = models.load_weights(init)[1]
    model = source if phase == "pre" else replace(source, classes=10, representation=None)
    job = Job(
        run=str(folder),
        directory=str(stage),
        attempt=1,
        key="twin",
        code=code_version(),
        model=models.to_dict(model),
        train=[str(pool / "pool")],
        init=str(init),
    )
    job.stop_file.parent.mkdir(parents=True)
    # The claim of the attempt, which the driver writes.
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    (folder / "attempts" / "000001.json").touch()
    np.savez(folder / "trace.npz", rows=trace["index"], images=trace.images, labels=trace.labels)
    task = {
        "config": config.plain(cfg),
        "job": asdict(job),
        "twin": {"arrays": str(folder / "trace.npz"), "parameters": str(stage / "parameters"), "steps": steps},
    }
    cluster = ClusterConfig(workers=workers, backend="processes")
    try:
        run_worker_group(twin.train_on_trace, task, cluster=cluster, name="group", directory=folder)
    except WorkerGroupError as error:
        if error.exit_code != Preempted.exit_code:  # stopped before the end of the schedule, as intended
            raise
    losses: list[float] = []
    norms: list[float] = []
    for record in read_metrics(stage):
        losses += record["losses"]
        norms += record["grad_norms"]
    return losses, norms, stage


def assert_follows(trace: Trace, name: str, values: list[float]) -> None:
    """Compare every step with the float64 run, with the tolerance of the step's range.

    The tolerances are four times the difference of an independent PyTorch float32 loop from the float64 run.
    """
    tolerances = json.loads((TWIN / "twin_A.json").read_text())["torch_float32_vs_float64"][trace.phase][name]
    expected = trace[f"{name}_f64"][: len(values)]
    errors = np.abs(np.array(values) / expected - 1)
    for last in RANGES:
        if last <= len(values):
            assert errors[:last].max() <= tolerances[f"1-{last}"]["rtol"], (name, last, errors[:last].max())


def assert_same_parameters(trace: Trace, part: str, found: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare parameters with those of the float32 run, without the biases of keys.

    Their gradient is zero in theory; in floating point Adam turns rounding noise into updates, without effect.
    """
    atol = trace.measured["params"][part]["atol"]
    expected = trace.parameters(part, folder)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        difference = (found[name] - values).abs()
        if name.endswith("qkv.bias"):
            width = len(difference) // 3
            difference[width : 2 * width] = 0
        assert difference.max() <= atol, (part, name, float(difference.max()))


def kept_parameters(stage: Path, step: int, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return the parameters after a step, assembled from the parts of all workers."""
    whole = {name: torch.full((shape.numel(),), torch.nan) for name, shape in shapes.items()}
    for path in (stage / "parameters").glob(f"{step}!*.npy"):
        _, name, start = path.stem.split("!")
        values = torch.from_numpy(np.load(path))
        whole[name][int(start) : int(start) + len(values)] = values
    return {name: values.view(shapes[name]) for name, values in whole.items()}


FAST = [
    ("pre", 100, 1, {"zero": 0}),
    ("pre", 100, 2, {"zero": 2, "micro_batch": 16}),
    ("ft", 100, 1, {"zero": 0}),
]
SLOW = [
    # The bits of exact mode at every world size are compared quickly in engine/test_exact.py.
    ("pre", 100, 2, {"zero": 2, "micro_batch": 16, "exact_parts": 4}),
    ("ft", 300, 1, {"zero": 0}),
    ("pre", 1000, 1, {"zero": 0}),
    ("pre", 100, 2, {"zero": 0, "micro_batch": 16}),
    ("pre", 100, 1, {"zero": 1, "micro_batch": 32}),
    ("pre", 100, 2, {"zero": 1, "micro_batch": 32}),
    ("pre", 100, 2, {"zero": 3, "micro_batch": 16}),
    ("ft", 100, 2, {"zero": 1, "micro_batch": 16}),
    ("ft", 100, 2, {"zero": 2, "micro_batch": 32}),
    ("ft", 100, 2, {"zero": 3, "micro_batch": 16}),
    ("ft", 100, 2, {"zero": 1, "micro_batch": 16, "exact_parts": 2}),
]


@pytest.mark.parametrize(
    ("phase", "steps", "workers", "changes"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_training_follows_the_original_run(phase, steps, workers, changes, pool, tmp_path) -> None:
    trace = Trace(phase)
    losses, norms, stage = follow(phase, pool, tmp_path, steps=steps, workers=workers, **changes)
    assert len(losses) == len(norms) == steps
    assert_follows(trace, "loss", losses)
    assert_follows(trace, "grad_norm", norms)

    model = models.load(tmp_path / ("weights-pre" if phase == "pre" else "resized"))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for step in twin.PARAMETERS_AFTER:
        assert_same_parameters(trace, f"after_{step}", kept_parameters(stage, step, shapes), tmp_path)

    if steps == len(trace["loss"]):
        trained = models.load(stage)
        pixels = torch.from_numpy(trace.images[1936:2000]).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            logits = trained(pixels).numpy()
        assert np.abs(logits - trace["heldout_logits_f64"]).max() <= trace.measured["heldout_logits"]["atol"]
