"""The largest batch is found with few tries, memory that runs out is noticed, and a table holds what was measured."""

from pathlib import Path

import pytest
import torch

from jobs.__main__ import main
from jobs.extras.studies import speed
from pipeline import artifacts


@pytest.mark.parametrize(
    ("holds", "most"),
    [(1, 64), (2, 64), (9, 64), (100, 4096), (1000, 4096), (5000, 512), (999, 1000), (5000, 1000)],
)
def test_the_largest_batch_is_found_to_an_eighth_with_few_tries(holds, most):
    tried = []

    def goes_through(batch: int) -> bool:
        tried.append(batch)
        return batch <= holds

    found = speed.largest_batch(goes_through, most)
    limit = min(holds, most)
    assert found == most or holds < most
    assert limit * 8 / 9 - 1 <= found <= limit and len(tried) <= 16
    assert speed.largest_batch(lambda batch: False, most) == 0


def test_a_cpu_that_runs_out_of_the_memory_that_it_is_given_says_no_and_goes_on():
    def forward(batch: int) -> None:
        torch.zeros(batch, 2**20, dtype=torch.float32)  # 4 MiB an image

    assert speed.fits(forward, 1.0, "cpu", 8)
    assert not speed.fits(forward, 0.25, "cpu", 512)
    assert torch.zeros(512, 2**18).sum() == 0, "the limit is gone again"

    def broken(batch: int) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        speed.fits(broken, 1.0, "cpu", 8)


def test_a_sweep_of_speeds_is_a_table_of_them(tmp_path: Path, capsys):
    recipe = tmp_path / "speed.yaml"
    recipe.write_text(
        f"run: {tmp_path}/run\n"
        "cluster: {workers: 1, backend: processes}\n"
        "speed:\n"
        "  model: {name: mu/8, image_size: 16, classes: 3}\n"
        "  batches: [2, 64]\n"
        "  most_batch: 8\n"
        "  seconds: 0.05\n"
        "  sweep: {grid: {precision: [fp32]}}\n"
    )
    assert main(["run", str(recipe)]) == 0
    (folder,) = tmp_path.glob("run/speed-????????")
    axes = artifacts.read_record(folder / "sweep.json")["axes"]["precision=fp32"]
    assert axes["largest_batch"] == 8 and axes["image_size"] == 16 and axes["images_per_s"] > 0
    (run,) = tmp_path.glob("run/speed.precision-fp32-*")
    assert list(artifacts.read_done(run)["by_batch"]) == ["2"], "a batch that does not fit is not timed"
    shown = capsys.readouterr().out
    assert "images/s in batches of 2" in shown and "largest batch 8, with which most_batch ends the search" in shown
    assert "largest_batch" in shown
