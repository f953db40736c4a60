"""Names of checkpoints in paths and URLs."""

import pytest

from jobs.extras.checkpoint_names import names_checkpoint

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/a/pretrain/step-50", True),
        ("runs/a/pretrain/checkpoints/step-0000000050-000002/", True),
        ("s3://bucket/a/step-0", True),
        ("step-7", True),
        ("runs/a/step-", False),
        ("runs/a/step-50.npz", False),
        ("runs/a/step-50-x", False),
        ("runs/step-50/pretrain", False),
        ("runs/a/bad-step-50", False),
        ("", False),
    ],
)
def test_only_the_last_part_of_a_path_names_a_checkpoint(path: str, expected: bool) -> None:
    assert names_checkpoint(path) == expected
