"""The paper's studies on digits, trained completely: every figure has points, and the page shows all figures."""

import json
import math
import subprocess
import sys

import pytest

from pipeline import artifacts
from tests.support import campaigns
from tests.support.hosts import ROOT

RECIPE = ROOT / "jobs" / "recipes" / "studies" / "all-laptop.yaml"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_laptop_study_ends_with_its_figure_and_the_page_shows_them_all(tmp_path):
    run = tmp_path / "studies"
    subprocess.run([sys.executable, "-m", "jobs", "run", str(RECIPE), f"run={run}"], cwd=ROOT, check=True)
    loaded = campaigns.load(RECIPE, [f"run={run}"])
    page = (run / "report.html").read_text()
    figures = [stage for stage in loaded.stages if stage.kind.name == "figure"]
    for stage in figures:
        folder = loaded.directory(stage)
        figure = artifacts.read_record(folder / "figure.json")
        values = [point["y"] for point in figure["points"]]
        # Accuracies above chance for ten classes; speeds and batch sizes are larger anyway.
        assert len(values) > 1, stage.name
        assert all(map(math.isfinite, values)), stage.name
        assert max(values) > 0.3, stage.name
        assert figure["stamp"].startswith("scaled down")
        assert figure["stamp"] in (folder / "figure.svg").read_text()
        assert json.dumps(stage.config.title)[1:-1] in page, stage.name
    of_paper = {
        artifacts.read_record(loaded.directory(stage) / "figure.json").get("paper", {}).get("table")
        for stage in figures
    }
    assert {"table 2", "table 6", "table 7", "table 8", "table 9"} <= of_paper
