"""The section `trackers:` of a recipe: which services get a copy of every stage's metrics.

trackers: {wandb: {project: vit}, mlflow: {uri: "https://mlflow.example"}}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from data.errors import ConfigError
from jobs.cluster_config import check_environment


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, through `pip install wandb`; WANDB_MODE=offline keeps everything in the stage's folder."""

    project: str = ""  # where its runs go; "": W&B is not used
    entity: str = ""  # the user or team that owns the project; "": that of the API key

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["project", "entity"], "free")


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow, through `pip install mlflow-skinny` or `mlflow`."""

    uri: str = ""  # of a tracking server, a database, or an absolute folder; "": MLflow is not used
    experiment: str = "patchline"  # where its runs go

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["uri", "experiment"], "free")

    def __post_init__(self) -> None:
        check_environment({"uri": self.uri}, "mlflow.")
        is_relative = self.uri and "://" not in self.uri and not self.uri.startswith("/")
        if is_relative:
            raise ConfigError(
                f"mlflow.uri is {self.uri}, expected https://…, or an absolute folder\n  type the path: /…"
            )


@dataclass(frozen=True)
class TrackersConfig:
    """What gets a copy of every stage's metrics; none of it changes what is computed."""

    wandb: WandbConfig = field(default_factory=WandbConfig)  # Weights & Biases: used where it has a project
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)  # MLflow: used where it has a uri

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(["wandb", "mlflow"], "free")

    def used(self) -> list[str]:
        """Return the names of the trackers that are asked for."""
        names = []
        if self.wandb.project:
            names.append("wandb")
        if self.mlflow.uri:
            names.append("mlflow")
        return names
