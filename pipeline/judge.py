"""What a worker beside training does (`evaluate_on: spare`): judge one committed checkpoint as the loop would have.

1. Every byte of the checkpoint is verified, and the weights are read: those that the loop computes with at that step.
2. The sets are read in the batches in which the workers that saved it would have read them, one part after the other.
   A product's last bits depend on the rows beside it, so that only the same batches give the same features.
3. Accuracy and the few-shot probe are computed as in the loop (pipeline/evaluation).

In:  {"config": …, "job": …, "checkpoint": "/runs/x/20-pretrain/checkpoints/step-0000001200", "folder": "…"}
Out: {"values": {"accuracy": 0.81, "judged": 50000}, "node": "n7", "seconds": 74.1, "remarks": []}
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

import models
from data.evaluation import EvaluationBatch
from data.index.document import load_index
from data.index.index import Index
from models import ModelConfig
from pipeline import config
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.manifest import Manifest, read_manifest, step_of
from pipeline.evaluation.async_evaluation import unreadable_line
from pipeline.evaluation.evaluate import accuracy, watched
from pipeline.evaluation.features import FeatureStore, collect
from pipeline.evaluation.protocols import few_shot_metrics
from pipeline.monitoring.watchdog import Phases
from pipeline.reports import part_of_set
from pipeline.training_config import TrainConfig
from pipeline.worker import Job


class Judged(TypedDict):
    """Holds what one evaluation beside training came to."""

    values: dict[str, float | int]  # as the loop records them
    node: str
    seconds: float  # from the reading of the weights on
    remarks: list[str]  # lines for people


def judge(task: Mapping[str, Any]) -> Judged:
    """Judge one checkpoint on the sets of its stage.

    Raises CheckpointError where it is not what was committed, and whatever the reading of a set raises.
    """
    began = time.monotonic()
    cfg = config.build(TrainConfig, task["config"], "config")
    job = Job(**task["job"])
    folder = Path(task["checkpoint"])
    step = step_of(folder)
    phases = Phases(Path(task["folder"]), 0, cfg.stall_s)
    phases.enter("load", step)
    manifest = read_manifest(folder)  # the weights are compared with its digests when they are read
    model_config = models.from_dict(job.model)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
    model = model_of(cfg, model_config, folder, manifest).to(device, dtype)

    def batches_of(index: Index) -> Iterator[EvaluationBatch]:
        for rank in range(manifest.world):
            samples = part_of_set(index, cfg, model_config, rank, manifest.world)
            yield from watched(samples, phases, step)

    def features_of(path: str) -> FeatureStore:
        index = load_index(path)
        store = FeatureStore(index, Path(task["folder"]))
        collect(model, store.watching(batches_of(index)), store, dtype, device)
        return store

    def beat() -> None:
        phases.enter("probe", step)

    values: dict[str, float | int] = {}
    remarks = []
    if job.evaluate:
        index = load_index(job.evaluate)
        share_right, judged = accuracy(model, batches_of(index), dtype, device)
        values |= {"accuracy": share_right, "judged": judged}
        if judged < index.samples:
            remarks.append(unreadable_line(index.samples - judged, job.evaluate))
    if job.probe_train and job.probe_test:
        values |= few_shot_metrics(features_of(job.probe_train), features_of(job.probe_test), cfg.probe, beat)
    phases.close()
    seconds = round(time.monotonic() - began, 3)
    return {"values": values, "node": socket.gethostname(), "seconds": seconds, "remarks": remarks}


def model_of(cfg: TrainConfig, model_config: ModelConfig, folder: Path, manifest: Manifest) -> torch.nn.Module:
    """Return the network with the weights that the loop computes with after the checkpoint's step, in fp32.

    Amid the steps these are the masters, also where the stage will end with averaged weights.
    """
    model = models.from_config(model_config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict(checkpoint.Reader(folder, manifest.files).weights(shapes), strict=False)
    # As `start.build_model` prepares it: compiled blocks may round differently. Nothing is recomputed in evaluation.
    if cfg.compile:
        models.compile_blocks(model)
    return model.eval()
