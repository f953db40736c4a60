"""Does a stage fit the cluster, and the data that is there already: its classes, image shapes, length of training."""

from data.errors import ConfigError, DataError
from data.index.index import Index
from jobs.recipe import class_names
from jobs.resolved_recipe import Campaign, Stage
from jobs.stages import evaluate, fewshot, sweep
from jobs.stages.evaluate import check_head
from jobs.worlds import allowed_worlds
from models.checks import did_you_mean
from pipeline.arithmetic import steps_of
from pipeline.config import require
from pipeline.evaluation.protocols import check_shape
from pipeline.training_config import TrainConfig, check_model, check_schedule


def check_stage(campaign: Campaign, stage: Stage) -> None:
    """Raise ConfigError or DataError where a stage does not fit the cluster, or the data that is there.

    `load` asks for every stage, so that `plan` refuses what `run` would; data that a stage before it makes is there
    when the stage is about to run, and then it asks again.
    """
    cfg = stage.config
    class_names.check(campaign, stage)
    if isinstance(cfg, fewshot.Config):
        # One question is enough: ProbeConfig takes both sets or neither.
        require(cfg.probe.train is not None, f"{stage.name}.probe.train and .test are missing: which sets?")
        if stage.model is not None:
            check_shape(cfg.preprocess, stage.model, f"{stage.name}.preprocess")
    if isinstance(cfg, evaluate.Config) and stage.model is not None:
        indexes = dict(class_names.those_made(campaign, {path: path for path in cfg.paths().values()}))
        check_head(cfg, stage.model, indexes, stage.name)
    if isinstance(cfg, sweep.Config):
        check_metrics(campaign, stage.name, cfg)
    if isinstance(cfg, TrainConfig):
        check_training(campaign, stage, cfg)


def check_training(campaign: Campaign, stage: Stage, cfg: TrainConfig) -> None:
    """Raise ConfigError or DataError where a trained stage does not fit the cluster, or the data that is there."""
    require(
        bool(cfg.data.train or cfg.data.mixture),
        f"{stage.name}.data.train is missing: a path, or @stage; or data.mixture",
    )
    try:
        allowed_worlds(cfg, campaign.cluster)  # reads and checks the user's DeepSpeed file as well
    except ConfigError as error:
        raise ConfigError(f"{stage.name}: {error}") from None

    indexes = indexes_to_train_on(campaign, stage.name, cfg)
    classes = classes_of(campaign, cfg, indexes)
    # The model is not known where the weights that it starts from do not exist.
    if stage.model is not None:
        check_model(cfg, stage.model, classes, f"{stage.name}.model")
        is_judged = cfg.data.evaluate is not None or cfg.probe.train is not None
        if is_judged:
            check_shape(cfg.data.preprocess, stage.model, f"{stage.name}.data.preprocess")
    # The steps are not known where passes are to be made over data that is not there.
    all_samples = cfg.data.samples
    if len(indexes) == len(cfg.data.sets()):
        all_samples = sum(index.samples for _, index in indexes)
    if cfg.steps is not None or all_samples is not None:
        check_schedule(cfg, steps_of(cfg, all_samples or 0), stage.name)


def indexes_to_train_on(campaign: Campaign, name: str, cfg: TrainConfig) -> list[tuple[str, Index]]:
    """Return the sets that a stage trains on and that are there, each with what the recipe calls it.

    Raises DataError where one is empty.
    """
    indexes = []
    for path, _weight in cfg.data.sets().values():
        index = class_names.set_at(campaign, path)
        if index is None:
            continue
        if index.samples == 0:
            raise DataError(f"{name}: {path} holds no samples\n  expected some: pack or index it again")
        indexes.append((path, index))
    return indexes


def classes_of(campaign: Campaign, cfg: TrainConfig, indexes: list[tuple[str, Index]]) -> dict[str, int]:
    """Return the number of classes of every labelled set that is there, by what the recipe calls it."""
    classes = {path: index.classes for path, index in indexes}
    if cfg.data.evaluate is not None:
        index = class_names.set_at(campaign, cfg.data.evaluate)
        if index is not None:
            classes[cfg.data.evaluate] = index.classes
    return classes


def check_metrics(campaign: Campaign, name: str, cfg: sweep.Config) -> None:
    """Raise ConfigError where a run of a sweep will not have the metric that the sweep's table is made of."""
    for run in cfg.runs:
        metrics = metrics_of(campaign.stage(run).config)
        if metrics is not None and cfg.best not in metrics:
            raise ConfigError(
                f"{name}: {run} will have no {cfg.best!r}{did_you_mean(cfg.best, metrics)}\n"
                f"  expected one of its metrics as sweep.best: {', '.join(metrics) or 'none'}\n"
                "  data.evaluate gives accuracy, probe gives 1shot, 5shot and so on, a stage evaluate what it is asked"
            )


def metrics_of(cfg: object) -> list[str] | None:
    """Return the metrics that a stage will have in the end; None where only the stage itself knows."""
    metrics = []
    if isinstance(cfg, TrainConfig) and cfg.data.evaluate is not None:
        metrics.append("accuracy")
    if isinstance(cfg, TrainConfig | fewshot.Config) and cfg.probe.train is not None:
        metrics += [f"{shots}shot" for shots in cfg.probe.shots]
    if isinstance(cfg, evaluate.Config):
        metrics += cfg.metrics()
    return metrics
