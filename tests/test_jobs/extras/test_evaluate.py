"""Names of data sets and weights in `evaluate`, and errors before anything is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest

from data.checks import check_name
from data.errors import UsageError
from jobs.__main__ import COMMANDS
from jobs.extras.evaluate import evaluate, is_setting, name_of, set_name_of

pytestmark = pytest.mark.quick

CONTEXT: Any = SimpleNamespace(obj=COMMANDS)  # of typer


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("shards/test", "test"),
        ("shards/test/", "test"),
        ("shards/test/t.index.json", "t"),
        ("vit_b16.npz", "vit_b16"),
        ("s3://bucket/runs/größe 1", "größe-1"),
        ("weights.safetensors", "weights"),
        ("/", "weights"),
    ],
)
def test_a_data_set_is_named_after_its_folder_or_file(path, name):
    assert name_of(path) == name


def test_sets_get_names_that_a_recipe_allows():
    for path in ("shards/größe 1", "s/" + "x" * 200, "s/v1.5"):
        check_name(set_name_of(path), "a data set", "rename it")
    assert set_name_of("shards/größe 1") == "gr--e-1"


def test_paths_with_an_equals_sign_are_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1" / "parts").mkdir(parents=True)
    for path in ("lr=0.1", "lr=0.1/test", "runs/lr=0.1/parts/test", f"{tmp_path}/k=1", "s3://bucket/k=1/test"):
        assert not is_setting(path)
    for setting in ("train=runs/lr=0.1/parts/train", "knn.k=[20]", "cluster.workers=4"):
        assert is_setting(setting)


def test_evaluate_without_a_data_set_suggests_a_command():
    with pytest.raises(
        UsageError,
        match=r"expected a data set to evaluate on, found none\n  add the path of .*evaluate runs/a runs/photos",
    ):
        evaluate(CONTEXT, "runs/a", ["knn.k=[20]"])


def test_an_unknown_protocol_gets_a_suggestion(tmp_path):
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(UsageError, match="unknown --protocol top-2; did you mean 'top-"):
        evaluate(CONTEXT, str(tmp_path), ["shards/test"], protocol=["top-2"])
