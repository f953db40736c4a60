"""The code's version covers every source that makes pixels or numbers."""

import shutil
from pathlib import Path

import pytest

from pipeline import versions

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("source", ["data/images/jpeg.cpp", "data/order.py", "models/weights/npz.py"])
def test_a_changed_source_is_another_version(source, tmp_path, monkeypatch) -> None:
    for package in versions.PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    unchanged = versions.code_version.__wrapped__()
    assert unchanged == versions.code_version()  # wherever the checkout lies
    with open(tmp_path / source, "a") as file:
        file.write("\n")
    assert versions.code_version.__wrapped__() != unchanged
