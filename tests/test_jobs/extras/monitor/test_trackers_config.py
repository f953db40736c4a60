"""The section `trackers:` of a recipe: valid values and used trackers."""

import pytest

from data.errors import ConfigError
from jobs.extras.monitor.trackers_config import MlflowConfig, TrackersConfig, WandbConfig

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("uri", ["", "https://mlflow.example", "/shared/mlruns"])
def test_mlflow_uri_may_be_a_url_or_an_absolute_folder(uri: str) -> None:
    assert MlflowConfig(uri=uri).uri == uri


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "mlruns",
            r"mlflow\.uri is mlruns, expected https://… or an absolute path\n  use the path of the folder from / on",
        ),
        ("https://me:hunter2@mlflow.example", r"looks like a secret \(by its value\)"),
    ],
)
def test_mlflow_uri_must_not_be_relative_or_contain_a_password(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MlflowConfig(uri=uri)


def test_a_tracker_is_used_if_its_destination_is_set() -> None:
    assert TrackersConfig().used() == []
    assert TrackersConfig(mlflow=MlflowConfig(uri="/shared/mlruns")).used() == ["mlflow"]
    assert TrackersConfig(WandbConfig("vit"), MlflowConfig("/shared/mlruns")).used() == ["wandb", "mlflow"]
