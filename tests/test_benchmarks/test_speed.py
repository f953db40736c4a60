"""The largest batch is found with few tries, out-of-memory errors are detected, and the table has the measurements."""

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import speed

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("holds", "most"),
    [(1, 64), (2, 64), (9, 64), (100, 4096), (1000, 4096), (5000, 512), (999, 1000), (5000, 1000)],
)
def test_largest_batch_is_found_within_an_eighth_in_few_tries(holds, most):
    tried = []

    def is_possible(batch: int) -> bool:
        tried.append(batch)
        return batch <= holds

    found = speed.largest_batch(is_possible, most)
    limit = min(holds, most)
    assert found == most or holds < most
    assert limit * 8 / 9 - 1 <= found <= limit
    assert len(tried) <= 16
    assert speed.largest_batch(lambda batch: False, most) == 0


def test_cpu_out_of_memory_is_detected_and_the_process_continues():
    def forward(batch: int) -> None:
        torch.zeros(batch, 2**20, dtype=torch.float32)  # 4 MiB an image

    assert speed.fits(forward, 1.0, "cpu", 8)
    assert not speed.fits(forward, 0.25, "cpu", 512)
    assert torch.zeros(512, 2**18).sum() == 0, "the limit is gone again"

    def broken(batch: int) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        speed.fits(broken, 1.0, "cpu", 8)


@pytest.mark.slow
def test_table_has_one_line_per_model_and_size(tmp_path: Path, capsys):
    words = ["--output", str(tmp_path), "--models", "mu/8", "--sizes", "16", "32", "--classes", "3", "--batches", "2"]
    speed.main([*words, "64", "--most-batch", "8", "--seconds", "0.05", "--precision", "fp32"])
    with open(tmp_path / "speed.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image_size"] for row in rows] == ["16", "32"]
    assert [row["largest_batch"] for row in rows] == ["8", "8"], "the search ends at --most-batch"
    assert all(float(row["images_per_s"]) > 0 for row in rows)
    assert "mu/8" in capsys.readouterr().out
    assert (tmp_path / "images_per_s.svg").read_text().startswith("<?xml")
    assert (tmp_path / "largest_batch.svg").exists()
