"""Class names of the sources of a pack stage."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.index.document import load_index
from jobs.__main__ import main
from jobs.extras.packing.sets import SetConfig, expected_samples, numbering_of, samples_of, source_names
from pipeline import config
from tests.support.tars import write_tar

pytestmark = pytest.mark.quick


def picture(value: int) -> bytes:
    return cv2.imencode(".jpg", np.full((16, 16, 3), value, np.uint8))[1].tobytes()


def features(names: list[str], nested: bool = False) -> dict[bytes, bytes]:
    """Return the metadata that Hugging Face's `datasets` writes into the schema of a parquet file."""
    label: dict = {"names": names, "_type": "ClassLabel"}
    if nested:
        label = {"feature": label, "_type": "List"}
    return {b"huggingface": json.dumps({"info": {"features": {"label": label}}}).encode()}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("parquet-features", ("tench", "goldfish")),
        ("parquet-nested", ("tench", "goldfish")),
        ("parquet-texts", ("goldfish", "tench")),
        ("table", ("goldfish, Carassius auratus", "tench")),
        ("imagenet-train", ("n01440764", "n01443537")),
        ("imagenet-validation", ("n01440764", "n01443537")),
        ("cifar10", ("airplane", "automobile")),
        ("tars", ("tench", "goldfish")),
        ("digits", tuple("0123456789")),
    ],
)
def test_sources_return_their_class_names(tmp_path, source, names):
    rows = [{"image": {"bytes": picture(n), "path": None}, "label": n} for n in range(2)]
    kind, _, variant = source.partition("-")
    path = tmp_path / kind
    options: dict[str, str] = {}
    if kind == "parquet":
        if variant != "features":
            rows = [row | {"label": [row["label"]] if variant == "nested" else ("tench", "goldfish")[n]}
                    for n, row in enumerate(rows)]  # fmt: skip
        table = pyarrow.Table.from_pylist(rows)
        if variant != "texts":
            table = table.replace_schema_metadata(features(["tench", "goldfish"], variant == "nested"))
        path.mkdir()
        parquet.write_table(table, path / "train-0.parquet")
    elif source == "table":
        (tmp_path / "a.jpg").write_bytes(picture(1))
        path.write_text('path,label\na.jpg,tench\na.jpg,"goldfish, Carassius auratus"\n')
        path = path.rename(tmp_path / "table.csv")
    elif source == "imagenet-train":
        inner = write_tar(tmp_path / "inner.tar", [("x.JPEG", picture(1))]).read_bytes()
        write_tar(path, [("n01443537.tar", inner), ("n01440764.tar", inner)])
    elif source == "imagenet-validation":
        write_tar(path, [("v0.JPEG", picture(1)), ("v1.JPEG", picture(2))])
        (tmp_path / "wnids.txt").write_text("n01443537\nn01440764\n")
        options["wnids"] = str(tmp_path / "wnids.txt")
    elif source == "cifar10":
        path.mkdir()
        (path / "data_batch_1.bin").write_bytes(bytes(3073))
        (path / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
    elif source == "tars":
        pack([Sample(f"s{n}", picture(n), (n,)) for n in range(2)], path, name="tars", names=("tench", "goldfish"))
    name = source if source.startswith("imagenet") else kind
    cfg = SetConfig(name, None if kind == "digits" else str(path), **options)  # type: ignore[arg-type]
    assert source_names(cfg) == names
    if source == "parquet-texts":
        assert main(["pack", "parquet", str(path), str(tmp_path / "set")]) == 0
        assert load_index(tmp_path / "set").names == names
        assert load_index(tmp_path / "set").class_counts == (1, 1)


def test_the_key_of_a_recipe_without_class_names_is_unchanged():
    forbidden = config.tagged(SetConfig(source="digits"), "forbid")
    assert set(forbidden) == {"source", "path", "root", "wnids", "real", "split", "keep", "image_size", "classes"}
    more = config.tagged(SetConfig(source="digits", rename={"0": "zero"}), "forbid")
    assert set(more) - set(forbidden) == {"rename"}


def test_the_expected_number_of_samples_is_that_of_packing(tmp_path: Path) -> None:
    for name in (
        "cat/0.jpg",
        "cat/@eaDir/0.jpg",
        "cat/notes.txt",
        "dog/1.png",
        "dog/.2.jpg",
        "#recycle/3.jpg",
        "4.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(picture(9))
    cfg = SetConfig(path=str(tmp_path))
    assert expected_samples(cfg) == 2 == len(list(samples_of(cfg, numbering_of(cfg, "train"))))
    assert expected_samples(SetConfig(path=str(tmp_path), unlabelled=True)) == 3


def test_subset_with_seed_0_differs_from_one_without_a_seed():
    part = SetConfig(source="subset", path="p", part=":98%")
    drawn = replace(part, seed=0)
    assert config.tagged(drawn, "forbid") == config.tagged(part, "forbid") | {"seed": 0}
