"""Packing is deterministic, resumable, and makes the same index that indexing its tars does."""

import io
import os
import struct
import tarfile
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow
import pytest
import webdataset
from pyarrow import parquet

from data.errors import DataError
from data.extras.doctor.doctor import check
from data.extras.known_sets.imagenet import train as imagenet_train
from data.extras.known_sets.imagenet import validation as imagenet_validation
from data.extras.sources.tables import image_parquet, path_table
from data.extras.sources.tars import tars
from data.images.decode import decode, library
from data.index.document import load_index
from data.index.index import exclude
from data.shards import reader
from data.shards.indexing import build_index
from data.shards.packing import pack
from data.shards.reader import ShardReader, check_sizes
from data.sources.folders import class_folders
from data.sources.samples import Sample, digits
from jobs.__main__ import main
from tests.support.tars import open_tar, picture, tar_of

pytestmark = pytest.mark.quick

needs_binding = pytest.mark.skipif(library() is None, reason="no C++ compiler, or Pillow is not the wheel")


def samples(count: int, classes: int = 5):
    return [Sample(f"s{n:05d}", picture(n % 256), (n % classes,)) for n in range(count)]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_samples_give_the_same_bytes(tmp_path):
    first, second = (pack(samples(25), tmp_path / name, shard_samples=10) for name in "ab")
    assert first.digest == second.digest
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert first.shard_samples.tolist() == [10, 10, 5]
    assert first.class_counts == (5, 5, 5, 5, 5)


def test_excluded_shard_may_be_missing(tmp_path):
    made = pack(samples(10), tmp_path, shard_samples=5)
    (tmp_path / "train-000001.tar").unlink()
    check_sizes(exclude([made], ["train-000001.tar"]))


def test_oversize_image_is_read_one_byte_past_the_decoders_limit(tmp_path, monkeypatch):
    made = pack(samples(1), tmp_path)
    monkeypatch.setattr(reader, "MAX_BYTES", 20)
    assert ShardReader(made).read(0, 0)[1] == picture(0)[:21]


def test_a_set_without_samples_has_no_classes(tmp_path):
    (tmp_path / "set.tar").write_bytes(tar_of({"notes.txt": b"1"}))
    assert build_index(tmp_path).class_counts == ()


def test_index_to_be_replaced_does_not_hide_another_one_that_would_lose_a_table(tmp_path, monkeypatch):
    for folder, name in (("own", "own"), ("other", "train"), ("new", "train")):
        pack(samples(2), tmp_path / folder, name=name)
    place = tmp_path / "index"
    build_index(tmp_path / "own", output=place, name="a")
    build_index(tmp_path / "other", output=place, name="b")
    glob = Path.glob  # a file system lists in any order; here the index to be replaced comes first
    monkeypatch.setattr(Path, "glob", lambda path, pattern: sorted(glob(path, pattern)))
    with pytest.raises(
        DataError, match=r"has a different shard named train-000000\.tar, whose table would be overwritten"
    ):
        build_index(tmp_path / "new", output=place, name="a")


def test_indexing_existing_tars_finds_what_packing_wrote(tmp_path):
    packed = pack(samples(23), tmp_path / "set", shard_samples=10)
    indexed = build_index(tmp_path / "set", output=tmp_path / "elsewhere", name="again")
    assert (indexed.digest, indexed.shards, indexed.class_counts) == (
        packed.digest,
        packed.shards,
        packed.class_counts,
    )
    packed_reader, indexed_reader = ShardReader(packed), ShardReader(indexed)
    assert packed_reader.read(2, 1) == indexed_reader.read(2, 1) == ("s00021", picture(21), b"1")


def test_progress_of_a_stopped_index_command_is_not_used_for_another_folder(tmp_path):
    first_folder, second_folder = tmp_path / "one", tmp_path / "other"
    for number, folder in enumerate((first_folder, second_folder)):
        folder.mkdir()
        entries = {f"{n}.{kind}": body for n in "ab" for kind, body in (("png", picture(number)), ("cls", b"1"))}
        (folder / "0.tar").write_bytes(tar_of(entries))
    (first_folder / "1.tar").write_bytes(b"not a tar")
    assert (first_folder / "0.tar").stat().st_size == (second_folder / "0.tar").stat().st_size
    with pytest.raises(DataError, match=r"1\.tar"):
        build_index(first_folder, output=tmp_path / "index", name="set")
    index = build_index(second_folder, output=tmp_path / "index", name="set")
    assert index.digest == build_index(second_folder, output=tmp_path / "fresh", name="set").digest


def test_shards_are_plain_webdataset(tmp_path):
    pack(samples(7), tmp_path, shard_samples=10)
    read = list(webdataset.WebDataset(str(tmp_path / "train-000000.tar"), shardshuffle=False))
    assert [(row["__key__"], row["jpg"], row["cls"]) for row in read] == [
        (s.key, s.image, str(s.labels[0]).encode()) for s in samples(7)
    ]


def test_shards_are_cut_by_bytes_too(tmp_path):
    size = len(picture(0, 64))
    made = pack((Sample(f"s{n}", picture(0, 64), (0,)) for n in range(10)), tmp_path, shard_bytes=3 * size)
    assert made.shard_samples.tolist() == [3, 3, 3, 1]


def test_several_labels_are_kept_and_counted_once_each(tmp_path):
    made = pack([Sample("a", picture(0), (1, 3)), Sample("b", picture(0), (3,))], tmp_path)
    assert made.class_counts == (0, 1, 0, 2)
    assert ShardReader(made).read(0, 0)[2] == b"1 3"


def test_class_folders_are_labelled_by_sorted_name_and_mixed(tmp_path):
    for name in ("dog", "cat"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for n in range(10):
            (tmp_path / "in" / name / f"{n}.v1.jpg").write_bytes(picture(n))
    made = list(class_folders(tmp_path / "in"))
    assert {sample.key for sample in made if sample.labels == (0,)} == {f"cat/{n}_v1" for n in range(10)}
    assert 0 < sum(sample.labels[0] for sample in made[:10]) < 10
    (tmp_path / "in" / "eel").mkdir()
    with pytest.raises(DataError, match=r"eel.*no images"):
        list(class_folders(tmp_path / "in"))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_of_paths_and_labels(tmp_path, kind):
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "b.jpg").write_bytes(picture(2))
    if kind == "csv":
        (tmp_path / "t.csv").write_text('path,label\na.jpg,3\nb.jpg,"1 2"\n')
    else:
        rows = pyarrow.table({"path": ["a.jpg", "b.jpg"], "label": [[3], [1, 2]]})
        parquet.write_table(rows, tmp_path / "t.parquet")
    made = {sample.key: sample for sample in path_table(tmp_path / f"t.{kind}")}
    assert made["a"].labels == (3,)
    assert made["b"].labels == (1, 2)
    assert made["b"].read() == picture(2)


def test_digits_split_is_stratified_and_fixed():
    train, test = list(digits(True)), list(digits(False))
    assert len(train) + len(test) == 1797
    assert not {s.key for s in train} & {s.key for s in test}
    assert set(Counter(s.labels[0] for s in test).values()) <= set(range(34, 37))


def test_labels_beyond_the_classes_are_refused_by_name(tmp_path):
    pack(samples(6), tmp_path)
    with pytest.raises(DataError, match=r"train-000000.tar: sample s00004 has label 4, but there are 4 classes"):
        build_index(tmp_path, classes=4)
    with pytest.raises(DataError, match=r"s00004 has labels \[4\], expected one or more of 0 … 3"):
        pack(samples(6), tmp_path / "x", classes=4)


def test_missing_short_and_altered_shards_are_named(tmp_path):
    made = pack(samples(40), tmp_path, shard_samples=10)
    check_sizes([made])
    (tmp_path / "train-000001.tar").unlink()
    with open(tmp_path / "train-000002.tar", "r+b") as file:
        file.truncate(1000)
    data = bytearray((tmp_path / "train-000003.tar").read_bytes())
    data[700] ^= 1
    (tmp_path / "train-000003.tar").write_bytes(data)
    with pytest.raises(
        DataError, match=r"(?s)2 of 4 shards.*000001.tar: No such.*000002.tar: found 1000 bytes, but the index"
    ):
        check_sizes([made])
    assert ShardReader(made).read(0, 0)[0] == "s00000"
    with pytest.raises(DataError, match=r"train-000003.tar: its sha256 differs from the index"):
        ShardReader(made).read(3, 0)
    with pytest.raises(DataError, match="1000 bytes"):
        ShardReader(made).read(2, 0)
    with pytest.raises(DataError, match=r"train-000002.tar: .*(truncated|wants)"):
        build_index(tmp_path)


def test_an_index_is_found_in_its_folder_and_refused_when_edited(tmp_path):
    made = pack(samples(4), tmp_path)
    assert load_index(tmp_path) == made
    path = tmp_path / "train.index.json"
    path.write_text(path.read_text().replace('"train-000000.tar", 4', '"train-000000.tar", 5').replace(" 4,", " 5,"))
    with pytest.raises(DataError, match="digest"):
        load_index(path)
    with pytest.raises(DataError, match="found none"):
        load_index(tmp_path.parent)


def test_links_pickles_and_devices_are_counted_and_never_samples(tmp_path):
    buffer = io.BytesIO()
    with open_tar(buffer, tarfile.GNU_FORMAT) as add:
        add("a.jpg", picture(0))
        add("a.cls", b"0")
        add("evil.pyd", b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
        add("../../out.jpg", picture(1))
        add("../../out.cls", b"1")
        add("b.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add("c.jpg", type=tarfile.CHRTYPE)
        add("folder", type=tarfile.DIRTYPE)
        add("x" * 200 + ".jpg", picture(2))
        add("x" * 200 + ".cls", b"2")
    (tmp_path / "t.tar").write_bytes(buffer.getvalue())
    index = build_index(tmp_path, name="t")
    assert index.samples == 2
    assert index.class_counts == (1, 0, 1)
    assert ShardReader(index).read(0, 1)[0] == "x" * 200
    text = (tmp_path / "t.index.json").read_text()
    assert '"link or device": 2' in text
    assert '"member type .pyd": 1' in text
    assert '"name with a folder ..": 2' in text


def test_packing_in_parallel_gives_the_same_bytes(tmp_path):
    reports = []

    def report(shards, finished_samples):
        reports.append((shards, finished_samples))

    alone = pack(samples(47), tmp_path / "one", shard_samples=5)
    in_parallel = pack(samples(47), tmp_path / "four", shard_samples=5, workers=4, report=report)
    assert alone == replace(in_parallel, directory=alone.directory)
    assert contents(tmp_path / "one") == contents(tmp_path / "four")
    assert reports[-1][1] == 47
    assert sorted(reports) == reports


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (lambda: [replace(sample, image=picture(200 - n)) for n, sample in enumerate(samples(12))], {}),
        (lambda: [replace(sample, labels=((n + 1) % 5,)) for n, sample in enumerate(samples(12))], {}),
        (lambda: samples(12)[::-1], {}),
        (lambda: samples(10), {}),  # as many shards, the last one smaller
        (lambda: samples(5), {}),
        (lambda: samples(17), {}),
        (lambda: samples(12), {"shard_samples": 4}),
        (lambda: samples(12), {"classes": 9}),
        (lambda: samples(12), {"names": tuple("vwxyz")}),
    ],
)
def test_finished_set_rejects_different_samples(tmp_path, given, options):
    finished = pack(samples(12), tmp_path, shard_samples=5)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"(?s)finished data set.*[0-9a-f]{64}.*use another folder or --name"):
        pack(given(), tmp_path, **{"shard_samples": 5, **options})
    assert contents(tmp_path) == before
    # The same samples make the same set, and nothing is written.
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert pack(samples(12), tmp_path, shard_samples=5) == finished
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_a_folder_of_the_same_names_and_older_files_is_another_source(tmp_path):
    """Names, labels and times alone could not distinguish the sources, for finished and interrupted sets alike."""
    for number, root in enumerate("ab"):
        for name in ("1", "2", "3"):
            path = tmp_path / root / "cat" / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(50 * number + int(name)))
            os.utime(path, (1e9, 1e9))
    pack(class_folders(tmp_path / "a"), tmp_path / "set", shard_samples=1)
    with pytest.raises(DataError, match=r"(?s)train-000000\.tar is a shard of a finished data set.*would change it"):
        pack(class_folders(tmp_path / "b"), tmp_path / "set", shard_samples=1)

    def stopped():
        yield from list(class_folders(tmp_path / "a"))[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(stopped(), tmp_path / "stopped", shard_samples=1)
    made = pack(class_folders(tmp_path / "b"), tmp_path / "stopped", shard_samples=1)
    assert made.digest == pack(class_folders(tmp_path / "b"), tmp_path / "fresh", shard_samples=1).digest


@pytest.mark.parametrize("lost", ["train-000001.tar", "train-000001.npy", "train-000000.tar"])
def test_lost_shards_of_a_finished_set_are_packed_again(tmp_path, lost):
    finished = pack(samples(12), tmp_path, shard_samples=5)
    before = contents(tmp_path)
    if lost == "train-000000.tar":
        (tmp_path / lost).write_bytes(before[lost][:-1] + b"x")
    else:
        (tmp_path / lost).unlink()
    assert pack(samples(12), tmp_path, shard_samples=5) == finished
    assert contents(tmp_path) == before


def test_a_source_never_holds_its_output(tmp_path, capsys):
    folder = tmp_path / "photos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.jpg").write_bytes(picture(9))
    before = sorted(folder.rglob("*"))
    (tmp_path / "link").symlink_to(folder)
    tar = folder / "cat" / "x-000000.tar"
    for output in (folder, folder / "shards", folder / "cat" / "deeper", tmp_path / "link"):
        assert main(["pack", "folder", str(folder), str(output)]) == 65
        said = capsys.readouterr().err
        assert f"{output} is inside the source folder " in said
        assert "photos-shards" in said
    assert sorted(folder.rglob("*")) == before
    tar.write_bytes(tar_of({"1.jpg": picture(1), "1.cls": b"0"}))
    assert main(["pack", "tars", str(folder / "cat" / "x-*.tar"), str(folder / "cat"), "--name", "x"]) == 65
    assert main(["pack", "folder", str(folder), str(tmp_path / "photos-shards")]) == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"run: {folder}/run\nshards: {{kind: pack, sets: {{train: {{path: {folder}}}}}}}\n")
    assert main(["run", str(recipe)]) == 65


def png_header(width: int, height: int) -> bytes:
    """Return a PNG header with these sides and without pixels."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b""
    for kind, content in ((b"IHDR", body), (b"IDAT", b""), (b"IEND", b"")):
        chunks += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_packing_and_indexing_count_unusable_images_by_the_doctors_reasons(tmp_path, capsys, caplog):
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    files = {"a.jpg": picture(1), "b.jpg": b"", "c.jpg": picture(2)[:-20], "d.png": png_header(20_000, 12_000)}
    files |= {f"e{n}.jpg": b"<html>no such image</html>" for n in range(9)}
    for name, body in files.items():
        (folder / name).write_bytes(body)
    (folder / "f.jpg").symlink_to("/nowhere.jpg")
    assert main(["pack", "folder", str(folder.parent), str(tmp_path / "set"), "--name", "x"]) == 0
    packed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused: ")]
    assert "not packed" in caplog.text
    assert "1 × broken link or device" in caplog.text
    assert main(["index", str(tmp_path / "set"), "--output", str(tmp_path / "index"), "--name", "x"]) == 0
    indexed = capsys.readouterr().out.splitlines()
    assert packed
    assert set(packed) <= set(indexed)
    expected = Counter({"not a JPEG, PNG or WebP": 9, "no image": 1, "truncated": 1, "image too large": 1})
    made = load_index(tmp_path / "set")
    assert made.refused.counts == expected
    assert made.refused.first["truncated"] == "cat/c of x-000000.tar"
    assert check(made).bad.counts == expected
    # On request, both decode the whole image: a file with a header and an end may still be broken.
    whole = cv2.imencode(".png", np.zeros((9, 9, 3), np.uint8))[1].tobytes()
    torn = whole[:45] + bytes(20) + whole[65:]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "t.tar").write_bytes(
        tar_of({"a.jpg": picture(1), "a.cls": b"0", "b.png": torn, "b.cls": b"0"})
    )
    for command in (["pack", "tars"], ["index"]):
        output = [str(tmp_path / "o1")] if command == ["pack", "tars"] else ["--output", str(tmp_path / "o2")]
        assert main([*command, str(tmp_path / "torn"), *output, "--check"]) == 65
        assert "bad: 1 × not decodable" in capsys.readouterr().out


def test_hidden_files_and_folders_are_skipped_and_counted_like_other_files(tmp_path, caplog):
    hidden = ("cat/.hidden.jpg", "cat/.ipynb_checkpoints/a-checkpoint.jpg", "cat/b/.thumbnails/x/a.jpg")
    for name in (".git/x.jpg", *hidden, "cat/a.jpg", "cat/b.gif", "cat/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(picture(1))
    assert [(s.key, s.labels) for s in class_folders(tmp_path)] == [("cat/a", (0,))]
    assert "because they are hidden or not jpg, jpeg, png, webp: 3 × hidden file, 1 × .gif, 1 × .txt" in caplog.text


def test_foreign_tar_and_excel_table_are_read_by_their_content(tmp_path):
    (tmp_path / "flat.tar").write_bytes(tar_of({"a.jpg": picture(1)}))
    with pytest.raises(DataError, match=r"flat\.tar: a\.jpg: "):
        list(imagenet_train(tmp_path / "flat.tar"))
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "table.csv").write_text("\ufeffpath,label\na.jpg,3\n", encoding="utf-8")
    assert [s.labels for s in path_table(tmp_path / "table.csv")] == [(3,)]
    (tmp_path / "table.csv").write_bytes("path,label\nä.jpg,3\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8 at byte 11"):
        list(path_table(tmp_path / "table.csv"))


def test_tars_with_restarting_keys_are_packed_together(tmp_path):
    for name in ("x", "y"):
        (tmp_path / f"{name}.tar").write_bytes(tar_of({"0.jpg": picture(1), "0.cls": b"3"}))
    made = pack(tars(tmp_path), tmp_path / "set")
    assert [ShardReader(made).read(0, n)[0] for n in (0, 1)] == ["x/0", "y/0"]


def test_error_names_the_file_with_an_invalid_name_or_label(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"image": [{"bytes": picture(1)}], "label": [-1]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"a\.parquet: row 0: '-1' contains no class ids"):
        list(image_parquet(tmp_path / "a.parquet"))
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    Path(os.fsdecode(bytes(folder) + b"/\xff.jpg")).write_bytes(picture(1))
    with pytest.raises(DataError, match="must be UTF-8"):
        list(class_folders(folder.parent))


@needs_binding
def test_restart_markers_change_bytes_but_no_pixel(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (100, 80, 3), dtype=np.uint8)
    image = cv2.imencode(".jpg", noise)[1].tobytes()
    packed = ShardReader(pack([Sample("a", image, (0,)), Sample("b", b"junk", (0,))], tmp_path, restarts=True))
    assert b"\xff\xd0" in packed.read(0, 0)[1]
    assert packed.read(0, 1)[1] == b"junk"
    assert np.array_equal(decode(packed.read(0, 0)[1]), decode(image))


def test_tars_of_img2dataset_are_repacked_with_labels_from_json(tmp_path):
    about = b'{"url": "http://x/1.jpg", "caption": "hi", "key": "000000001", "status": "success", "label": 4}'
    body = tar_of({"000000001.jpg": picture(1), "000000001.json": about, "000000001.txt": b"hi", "2.jpg": picture(2)})
    (tmp_path / "00000.tar").write_bytes(body)
    (tmp_path / "00000_stats.json").write_text("{}")
    (tmp_path / "00000.parquet").write_bytes(b"")
    assert list(tars(tmp_path)) == [Sample("00000/000000001", picture(1), (4,))], "what has no label is left out"
    (tmp_path / "00000.tar").write_bytes(tar_of({"a.jpg": picture(1), "a.json": b'{"caption": "hi"}'}))
    with pytest.raises(DataError, match="no sample has both a label and an image"):
        list(tars(tmp_path))


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "fine_label"), ("jpg", "label")])
def test_parquet_of_hugging_face_and_of_img2dataset_is_read(tmp_path, image, label):
    cells = [picture(n) if image == "jpg" else {"bytes": picture(n), "path": None} for n in range(3)]
    rows = [{image: cell, label: n} for n, cell in enumerate(cells)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-0.parquet")
    assert [(s.image, s.labels) for s in image_parquet(tmp_path)] == [(picture(n), (n,)) for n in range(3)]


def test_imagenet_is_read_as_it_is_distributed(tmp_path):
    inner = {f"n0{c}.tar": tar_of({f"n0{c}_{n}.JPEG": picture(10 * c + n) for n in range(3)}) for c in (2, 1)}
    (tmp_path / "train.tar").write_bytes(tar_of(inner))
    images_by_key = {s.key: (s.image, s.labels) for s in imagenet_train(tmp_path / "train.tar")}
    assert images_by_key == {f"n0{c}_{n}": (picture(10 * c + n), (c - 1,)) for c in (1, 2) for n in range(3)}
    (tmp_path / "val.tar").write_bytes(tar_of({f"v{n}.JPEG": picture(n) for n in (1, 0)}))
    (tmp_path / "wnids.txt").write_text("n02\nn01\n")
    val = imagenet_validation(tmp_path / "wnids.txt", tmp_path / "val.tar")
    assert [(s.key, s.labels) for s in val] == [("v0", (1,)), ("v1", (0,))]
