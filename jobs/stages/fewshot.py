"""The few-shot stage: evaluate frozen features by linear regression on a few training images per class.

    fewshot:
      init: "@pretrain"
      probe: {train: "@shards/train", test: "@shards/test", shots: [1, 5, 10]}

The stage runs the protocol `fewshot` (pipeline/evaluation/protocols.py) and writes metrics.json: for each number of
shots, the accuracy of each draw and the mean over the draws.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from data.checks import at_least, more_than_0
from data.files import write_atomically
from data.remote.config import CacheConfig
from jobs.resolved_recipe import Available, CheckResult, Context, Reads, SharedClasses, Stage, StageKind
from jobs.stages import training
from jobs.stages.evaluate import EvaluateConfig, evaluate_on_workers
from models import ModelConfig
from pipeline.architecture import check_shape
from pipeline.config import Tags, require, tags
from pipeline.evaluation import document
from pipeline.evaluation.protocols import probe_protocol
from pipeline.monitoring.telemetry import without_single_seeds
from pipeline.training_config import ProbeConfig, check_ops


@dataclass(frozen=True)
class FewShotStageConfig:
    """The weights and data sets of a few-shot evaluation."""

    init: str = "???"  # weights: a folder, or "@stage"
    probe: ProbeConfig = field(default_factory=ProbeConfig)  # both data sets are required
    preprocess: str | None = None  # None: resize(image_size), which ignores the aspect ratio as big_vision does
    micro_batch: int = 64  # images per worker and forward pass
    cache: CacheConfig = field(default_factory=CacheConfig)  # for remote shards, on each node
    precision: Literal["bf16", "fp32"] = "fp32"  # precision of the forward pass
    stall_s: float = 600.0  # if no worker enters a new phase for this long, the attempt ends and the next one starts

    RESUME: ClassVar[Tags] = tags(forbid="init probe preprocess precision", free="micro_batch cache stall_s")

    def __post_init__(self) -> None:
        check_ops(self.preprocess)
        at_least(self, 1, "micro_batch")
        more_than_0(self, "stall_s")


class FewShot(StageKind):
    """The stage kind that evaluates frozen features by few-shot linear regression (paper, section 4.1).

    A prediction is correct if it equals the first label of the test sample. The probe during training uses the same
    rule, so the accuracies are comparable with the training curves.
    """

    name = "fewshot"
    config = FewShotStageConfig
    inputs: ClassVar = {"init": Reads.WEIGHTS, "probe.train": Reads.SET, "probe.test": Reads.SET}

    def run(self, cfg: FewShotStageConfig, context: Context) -> dict[str, object]:
        """Evaluate the weights with the protocol `fewshot` on the workers; write metrics.json."""
        from pipeline.evaluation.evaluator import Request
        from pipeline.evaluation.worker import WorkerConfig

        worker_config = WorkerConfig(
            preprocess=cfg.preprocess or f"resize({context.model.image_size})",
            # Only the first label counts, but a sample with more labels than this would be excluded.
            max_labels=EvaluateConfig.max_labels,
            micro_batch=cfg.micro_batch,
            precision=cfg.precision,
            stall_s=cfg.stall_s,
            cache=cfg.cache,
        )
        assert cfg.probe.test is not None, "`checks` refuses a probe without data sets"
        init = context.campaign.path_of(cfg.init)
        test = context.campaign.path_of(cfg.probe.test)
        train = context.campaign.path_of(cfg.probe.train)
        request = Request(test, train, probe_protocol(cfg.probe), first_label=True)
        (result,) = evaluate_on_workers(worker_config, init, [request], context)
        metrics = document.metrics_with_seeds(result)
        results = {
            "metrics": metrics,
            "train_samples": result["train"]["used"],
            "test_samples": result["set"]["judged"],
            "probe": asdict(cfg.probe),
        }
        write_atomically(context.directory / "metrics.json", json.dumps(results, indent=1))

        # Log only the means; metrics.json also has the accuracies of single draws ("…seed…").
        means = []
        for name, value in without_single_seeds(metrics).items():
            means.append(f"{name} {value:.4f}")
        context.log("  ".join(means))
        for note in document.notes_of(result):
            context.log(note)
        return results

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Check that the probe's data sets are given and usable, and that their images have the model's input size."""
        cfg: FewShotStageConfig = stage.config
        # Checking one field is enough, because ProbeConfig requires both data sets or none.
        require(
            cfg.probe.train is not None,
            f"{stage.name}.probe.train and {stage.name}.probe.test are missing\n"
            "  expected two data sets: the path of an index, or @STAGE/SET",
        )
        if stage.model is not None:
            check_shape(cfg.preprocess, stage.model, f"{stage.name}.preprocess")
        if available.checks_files:
            training.check_evaluated({f"{stage.name}.probe": (cfg.probe.test, cfg.probe.train)}, available)
        return ()

    def model(self, cfg: FewShotStageConfig, source: ModelConfig | None) -> ModelConfig | None:
        """Return the architecture of the weights; None if they are missing."""
        return source

    def shared_classes(self, cfg: FewShotStageConfig) -> list[SharedClasses]:
        """Return the two data sets of the probe."""
        return [training.classes_of_probe(cfg.probe)]

    def metrics(self, cfg: FewShotStageConfig) -> Iterable[str]:
        """Return the names of the few-shot accuracies."""
        return training.metrics_of_probe(cfg.probe)
