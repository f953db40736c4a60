"""The `trackers:` section of a recipe: experiment trackers that receive each stage's metrics.

trackers: {wandb: {project: vit}, mlflow: {uri: "https://mlflow.example"}}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from data.errors import ConfigError
from jobs.cluster_config import check_environment


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; needs `pip install wandb`. WANDB_MODE=offline writes everything to the stage's folder."""

    project: str = ""  # project of the W&B runs; "": W&B is not used
    entity: str = ""  # user or team that owns the project; "": the owner of the API key

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["project", "entity"], "free")


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow; needs `pip install mlflow-skinny` or `mlflow`."""

    uri: str = ""  # tracking server, database, or absolute folder; "": MLflow is not used
    experiment: str = "patchline"  # experiment of the MLflow runs

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["uri", "experiment"], "free")

    def __post_init__(self) -> None:
        check_environment({"uri": self.uri}, "mlflow.")
        is_relative = self.uri and "://" not in self.uri and not self.uri.startswith("/")
        if is_relative:
            raise ConfigError(
                f"mlflow.uri is {self.uri}, expected https://… or an absolute path\n"
                "  use the path of the folder from / on"
            )


@dataclass(frozen=True)
class TrackersConfig:
    """Experiment trackers that receive each stage's metrics; they do not change the training."""

    wandb: WandbConfig = field(default_factory=WandbConfig)  # used if it has a project
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)  # used if it has a uri

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["wandb", "mlflow"], "free")

    def used(self) -> list[str]:
        """Return the names of the configured trackers."""
        names = []
        if self.wandb.project:
            names.append("wandb")
        if self.mlflow.uri:
            names.append("mlflow")
        return names
