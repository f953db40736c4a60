"""The digits included in Patchline are scikit-learn's copy of the UCI data set, with its licence."""

import ast
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import cv2
import numpy as np
import pytest
from sklearn.datasets import load_digits

from data.extras.shards.packing import pack
from data.extras.sources.samples import DIGITS, DIGITS_FILE, digits

ROOT = Path(__file__).parents[4]
# Digests of the data sets of the recipe digits. Without IPP they are the same on every processor. That of the test set
# was recorded at 34ca97e with IPP on an Intel Xeon, that of the training set on an AMD EPYC.
DIGESTS = {
    "train": "3f65419115c2ab86bfed1818719010cc9b5472efb34bc49db9a24df1fb280622",
    "test": "29b1eb5d92f4944322911474049176c8e26b5a2cd6e54647e0c1873b9c3faea8",
}


@pytest.fixture
def without_ipp() -> Iterator[None]:
    cv2.ipp.setUseIPP(False)
    yield
    cv2.ipp.setUseIPP(True)


def test_digits_are_those_of_scikit_learn_split_within_each_class(without_ipp):
    dataset = load_digits()
    seen = dict.fromkeys(range(10), 0)
    expected = {"train": [], "test": []}
    for number, (pixels, label) in enumerate(zip(dataset.images, dataset.target.tolist(), strict=True)):
        seen[label] += 1
        grey = np.round(pixels * 255 / 16).astype(np.uint8)
        image = cv2.resize(grey, (32, 32), interpolation=cv2.INTER_CUBIC)
        encoded = cv2.imencode(".jpg", np.stack([image] * 3, 2), [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
        part = "test" if seen[label] % 5 == 0 else "train"
        expected[part].append((f"digit{number:04d}", encoded, (label,)))
    for part, samples in expected.items():
        assert [(sample.key, sample.image, sample.labels) for sample in digits(part == "train")] == samples


def test_the_sets_of_the_recipe_keep_their_digests(tmp_path):
    for name, digest in DIGESTS.items():
        index = pack(digits(name == "train"), tmp_path / name, name=name, shard_samples=100, names=DIGITS)
        assert index.digest == digest


def test_the_file_and_its_licence_are_packaged_together():
    licence = DIGITS_FILE.with_name("digits.LICENSE").read_text()
    assert sha256(DIGITS_FILE.read_bytes()).hexdigest() in licence
    assert "CC BY 4.0" in licence
    assert "BSD 3-Clause License" in licence
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["data.extras.sources"] == ["digits.csv.gz", "digits.LICENSE"]


def test_no_module_imports_an_undeclared_dependency():
    imported = set()
    for package in ("models", "data", "pipeline", "jobs"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported.update(alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.split(".")[0])
    assert "numpy" in imported
    assert not imported & {"sklearn", "pandas", "h5py", "tensorflow", "tensorflow_datasets"}
