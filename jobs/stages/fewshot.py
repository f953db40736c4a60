"""The few-shot stage: it evaluates frozen features by linear regression on a few images per class.

    fewshot:
      init: "@pretrain"
      probe: {train: "@shards/train", test: "@shards/test", shots: [1, 5, 10]}

The stage writes metrics.json: for each number of shots the mean accuracy over the draws, and each draw's accuracy. It
is the protocol `fewshot` (pipeline/evaluation/protocols.py) as a separate stage.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from data.checks import at_least, more_than_0
from data.files import write_atomically
from data.remote.config import CacheConfig
from jobs.resolved_recipe import Available, CheckResult, Context, Reads, SharedClasses, SourceModel, Stage, StageKind
from jobs.stages import training
from jobs.stages.evaluate import evaluate_on_workers
from models import ModelConfig
from pipeline.architecture import check_shape
from pipeline.config import Tags, require, tags
from pipeline.evaluation import document
from pipeline.evaluation.protocols import probe_protocol
from pipeline.monitoring.telemetry import without_single_seeds
from pipeline.training_config import ProbeConfig, check_ops


@dataclass(frozen=True)
class FewShotStageConfig:
    """Which weights are probed on which sets."""

    init: str = "???"  # weights: a folder, or "@stage"
    probe: ProbeConfig = field(default_factory=ProbeConfig)  # both sets are needed here
    preprocess: str | None = None  # None: resize(image_size), the squash of big_vision's evaluator
    micro_batch: int = 64  # images a worker at a time
    cache: CacheConfig = field(default_factory=CacheConfig)  # of remote shards, on every node
    precision: Literal["bf16", "fp32"] = "fp32"  # in which features are computed
    stall_s: float = 600.0  # in which no worker enters a new phase; then the attempt ends and the next begins

    RESUME: ClassVar[Tags] = tags(forbid="init probe preprocess precision", free="micro_batch cache stall_s")

    def __post_init__(self) -> None:
        check_ops(self.preprocess)
        at_least(self, 1, "micro_batch")
        more_than_0(self, "stall_s")


class FewShot(StageKind):
    """The kind of stage that evaluates frozen features by few-shot linear regression (paper, section 4.1).

    It is the protocol fewshot as a stage of its own. The accuracies of every number of shots, means and single draws,
    go to metrics.json. A prediction is right if it is the test sample's first label, as in training, so that its
    numbers compare with the curves there.
    """

    name = "fewshot"
    config = FewShotStageConfig
    inputs: ClassVar = {"init": Reads.WEIGHTS, "probe.train": Reads.SET, "probe.test": Reads.SET}

    def run(self, cfg: FewShotStageConfig, context: Context) -> dict[str, object]:
        """Evaluate the weights by the protocol fewshot on the workers; write the results to metrics.json."""
        from pipeline.evaluation.evaluator import Request
        from pipeline.evaluation.worker import WorkerConfig

        worker_config = WorkerConfig(
            preprocess=cfg.preprocess or f"resize({context.model.image_size})",
            max_labels=1,
            micro_batch=cfg.micro_batch,
            precision=cfg.precision,
            stall_s=cfg.stall_s,
            cache=cfg.cache,
        )
        assert cfg.probe.test is not None, "`checks` refuses a probe without sets"
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

        # The single draws of the shots ("…seed…") are in metrics.json; a person sees their means.
        means = []
        for name, value in without_single_seeds(metrics).items():
            means.append(f"{name} {value:.4f}")
        context.log("  ".join(means))
        return results

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Refuse a probe without sets, of other images than the model's, or on sets that cannot be read."""
        cfg: FewShotStageConfig = stage.config
        # A single check is enough: ProbeConfig takes both sets or neither.
        require(cfg.probe.train is not None, f"{stage.name}.probe.train and .test are missing: which sets?")
        if stage.model is not None:
            check_shape(cfg.preprocess, stage.model, f"{stage.name}.preprocess")
        if available.checks_files:
            training.check_evaluated({f"{stage.name}.probe": (cfg.probe.test, cfg.probe.train)}, available)
        return ()

    def model(self, cfg: FewShotStageConfig, source_model: SourceModel) -> ModelConfig | None:
        """Return the architecture of the weights; None if they are missing."""
        return source_model(cfg.init)

    def shared_classes(self, cfg: FewShotStageConfig) -> list[SharedClasses]:
        """Return the two sets of the probe."""
        return [training.classes_of_probe(cfg.probe)]

    def metrics(self, cfg: FewShotStageConfig) -> Iterable[str]:
        """Return the names of the few-shot accuracies."""
        return training.metrics_of_probe(cfg.probe)
