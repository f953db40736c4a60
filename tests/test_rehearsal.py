"""A worker's step on a simulated GPU: devices, shapes, types, kernels and memory (docs/design/tests.md)."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from data.files import import_path
from pipeline.extras.plan.memory import memory_need
from pipeline.extras.plan.memory_traces import Kind, step_to_trace
from pipeline.training_config import TrainConfig

ROOT = Path(__file__).parents[1]
TORCH = Path(torch.__file__).parent
WORLD = 8


@pytest.fixture(autouse=True)
def untraced(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace steps for real, into a folder of this test session."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path_factory.getbasetemp() / "traces"))


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that makes torch's CPU build accept "cuda" as a device."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++, c++): the guard for fake CUDA tensors cannot be built")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    include = TORCH / "include"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{include}"]
    command += [f"-I{include}/torch/csrc/api/include", str(ROOT / "tests" / "support" / "cuda_guard.cpp")]
    command += [f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH}/lib", "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def rehearsed(guard: Path, cfg: TrainConfig, model: models.ModelConfig, recomputed: int = 0) -> dict[str, Any]:
    """Return the report of tests/support/rehearsal.py about the step."""
    step = dataclasses.asdict(step_to_trace(cfg, model, WORLD, 1, recomputed, is_gpu=True))
    for name in ("file", "is_gpu"):
        del step[name]
    question = json.dumps({"step": step, "micro_batch": cfg.micro_batch})
    environment = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rehearsal", str(guard), question],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


CASES = [
    ("B/16", 2, {"dropout": 0.1}, 0),
    ("S/16", 1, {}, 0),
    ("S/16", 3, {}, 0),
    ("S/16", 2, {"positions": "relative"}, 3),
    ("R26+S/32", 2, {}, 0),
    ("H/14", 2, {}, 0),
]
# The paper, table 1, and at 224 px with the class token: width, MLP, blocks, tokens. A hybrid's patches are 32 px.
SHAPES = {
    "B/16": (768, 3072, 12, 197),
    "S/16": (384, 1536, 12, 197),
    "R26+S/32": (384, 1536, 12, 50),
    "H/14": (1280, 5120, 32, 257),
}
IMAGES = 16


@pytest.mark.slow
@pytest.mark.parametrize(("name", "zero", "options", "recomputed"), CASES, ids=lambda value: str(value))
def test_rehearsed_step_on_a_simulated_gpu(guard, name, zero, options, recomputed):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the tests that are marked gpu take real steps on it")
    model = models.config_of(name, 224, 1000, **options)
    cfg = TrainConfig(steps=1, zero=zero, micro_batch=IMAGES, batch_size=IMAGES * WORLD, checkpoint_blocks=recomputed)
    seen = rehearsed(guard, cfg, model, recomputed)
    parameters = models.parameters_of(models.config_of(name, 224, 1000, **options))

    check_devices(seen)
    check_types_and_shapes(seen, *SHAPES[name])
    # Each of eight workers has an eighth of the master weights and moments, in fp32 with little padding.
    assert seen["parameters"] == ["cuda:0 torch.bfloat16"]
    assert seen["masters"] == seen["moments"] == ["cuda:0 torch.float32"]
    assert parameters <= seen["of_this_worker"] * WORLD <= parameters * 1.001
    assert seen["updates"] == 3
    # Kernels expected on a GPU: fused attention, dropout with a byte mask, one kernel for AdamW.
    kernels = seen["kernels"]
    assert "aten::_fused_adamw_" in kernels
    assert any("flash_attention" in kernel or "efficient_attention" in kernel for kernel in kernels)
    assert ("aten::native_dropout" in kernels) == ("dropout" in options)

    # The plan is computed without the guard, with stand-ins for what differs on a GPU: the same bytes.
    need = memory_need(cfg, model, WORLD, is_gpu=True)
    on_device = sum(size for kind, size in seen["parts"].items() if kind != Kind.IMAGES.name)
    planned = sum(size for kind, size in need.parts.items() if kind is not Kind.IMAGES)
    assert on_device == pytest.approx(planned, rel=0.01)
    # By hand: bf16 weights, an eighth of master and two moments in fp32.
    states = 2 * parameters + 12 * parameters / WORLD
    if zero == 3:
        # An eighth of the weights, one bucket of fp32 gradients, and an eighth of the gradients.
        states = (2 + 12 + 4) * parameters / WORLD + 4 * parameters
    assert seen["parts"]["STATES"] == pytest.approx(states, rel=0.05)


def check_devices(seen: dict[str, Any]) -> None:
    """Assert that everything computes on the GPU, copies from the host do not wait, and the host reads once."""
    assert seen["mixed"] == [], "operations with tensors of two devices"
    for phase in ("batch", "forward", "backward"):
        assert set(seen["devices"][phase]) == {"cuda"}, phase
    assert seen["copies"] == [], "copies for which the host waits"
    assert seen["is_snapshot_pinned"]
    # Computing waits for the stream of the copies, whose memory is marked as used on another stream.
    assert seen["too_early"] == []
    assert seen["unrecorded"] == 0
    # The norm, and the numbers that workers agree on: loss, bad samples, stop, written.
    assert seen["reads"] == {"update": 5}


def check_types_and_shapes(seen: dict[str, Any], width: int, hidden: int, blocks: int, tokens: int) -> None:
    """Assert bf16 outputs of the paper's shapes, gradient sums in fp32, and weights gathered in bf16."""
    outputs = seen["outputs"]
    assert {output[0] for output in outputs.values()} == {"bfloat16"}
    for number in range(blocks):
        # The last block computes only the class token, which is the only one used.
        computed = 1 if number == blocks - 1 else tokens
        assert outputs[f"blocks.{number}"] == ["bfloat16", IMAGES, computed, width]
        assert outputs[f"blocks.{number}.mlp.up"] == ["bfloat16", IMAGES, computed, hidden]
    assert f"blocks.{blocks}" not in outputs
    assert outputs["embedding"] == ["bfloat16", IMAGES, tokens - 1, width]
    assert outputs["logits"] == ["bfloat16", IMAGES, 1000]
    assert "float64" not in seen["dtypes"]["forward"]
    assert "float16" not in seen["dtypes"]["forward"]
    for name, types in seen["sums"].items():
        is_sum = "reduce" in name
        assert set(types) <= ({"float32", "float64"} if is_sum else {"bfloat16"}), name
