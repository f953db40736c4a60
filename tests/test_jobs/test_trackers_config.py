"""The section `trackers:` of a recipe: what may be in it, and which trackers it asks for."""

import pytest

from data.errors import ConfigError
from jobs.trackers_config import MlflowConfig, TrackersConfig, WandbConfig

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("uri", ["", "https://mlflow.example", "/shared/mlruns"])
def test_metrics_go_to_an_address_or_an_absolute_folder(uri: str) -> None:
    assert MlflowConfig(uri=uri).uri == uri


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("mlruns", r"mlflow\.uri is mlruns, expected https://…, or an absolute folder\n  type the path: /…"),
        ("https://me:hunter2@mlflow.example", r"looks like a secret \(by its value\)"),
    ],
)
def test_a_relative_folder_and_a_password_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MlflowConfig(uri=uri)


def test_a_tracker_is_used_if_the_recipe_says_to_which_place_its_metrics_go() -> None:
    assert TrackersConfig().used() == []
    assert TrackersConfig(mlflow=MlflowConfig(uri="/shared/mlruns")).used() == ["mlflow"]
    assert TrackersConfig(WandbConfig("vit"), MlflowConfig("/shared/mlruns")).used() == ["wandb", "mlflow"]
