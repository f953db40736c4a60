"""Names of data sets and weights in `evaluate`, and errors before anything is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import UsageError
from jobs.__main__ import COMMANDS
from jobs.extras.evaluate import evaluate, name_of

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
