"""Packing is deterministic, resumable, and makes the same index that indexing its tars does."""

import io
import os
import tarfile
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest
import webdataset
from PIL import Image

from data import reader
from data.errors import DataError
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.folders import class_folders
from data.extras.sources.samples import DIGITS, Sample, digits
from data.images.decode import decode, library
from data.index.document import load_index
from data.index.index import exclude
from data.reader import ShardReader, check_sizes
from jobs.__main__ import main
from tests.support.shards import Picture, write_set
from tests.support.shards import digits as written_digits
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


def test_hidden_files_and_folders_are_skipped_and_counted_like_other_files(tmp_path, caplog):
    hidden = ("cat/.hidden.jpg", "cat/.ipynb_checkpoints/a-checkpoint.jpg", "cat/b/.thumbnails/x/a.jpg")
    for name in (".git/x.jpg", *hidden, "cat/a.jpg", "cat/b.gif", "cat/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(picture(1))
    assert [(s.key, s.labels) for s in class_folders(tmp_path)] == [("cat/a", (0,))]
    assert "because they are hidden or not jpg, jpeg, png, webp: 3 × hidden file, 1 × .gif, 1 × .txt" in caplog.text


def test_key_too_long_for_the_table_is_an_error_and_not_a_missing_sample(tmp_path):
    longest = "ß" * 256  # 512 bytes
    assert pack([Sample(longest, picture(1), (0,))], tmp_path / "a").samples == 1
    with pytest.raises(DataError, match="has 513 bytes, expected at most 512"):
        pack([Sample(f"{longest}a", picture(1), (0,)), Sample("b", picture(2), (1,))], tmp_path / "b")


@needs_binding
def test_restart_markers_change_bytes_but_no_pixel(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (100, 80, 3), dtype=np.uint8)
    image = cv2.imencode(".jpg", noise)[1].tobytes()
    packed = ShardReader(pack([Sample("a", image, (0,)), Sample("b", b"junk", (0,))], tmp_path, restarts=True))
    assert b"\xff\xd0" in packed.read(0, 0)[1]
    assert packed.read(0, 1)[1] == b"junk"
    assert np.array_equal(decode(packed.read(0, 0)[1]), decode(image))


@needs_binding
@pytest.mark.parametrize("has_marker", [True, False])
def test_restart_markers_keep_the_colours_of_a_cmyk_jpeg_with_and_without_adobes_marker(tmp_path, has_marker):
    out = io.BytesIO()
    Image.fromarray(np.full((16, 16, 4), (0, 245, 135, 55), np.uint8), "CMYK").save(out, "JPEG", quality=100)
    image = out.getvalue()
    start = image.index(b"\xff\xee")  # of the Adobe marker, which Pillow always writes: 2 bytes, then 14
    if not has_marker:
        image = image[:start] + image[start + 16 :]
    packed = ShardReader(pack([Sample("a", image, (0,))], tmp_path, restarts=True)).read(0, 0)[1]
    assert np.array_equal(decode(packed), decode(image))


def test_sets_written_by_tarfile_for_other_tests_are_those_of_packing(tmp_path):
    pictures = [*islice(written_digits(True, image_size=16), 30), Picture(f"deep/{'long' * 30}", picture(7), (4, 2))]
    write_set(pictures, tmp_path / "theirs", shard_samples=12, names=DIGITS)
    packed = [*islice(digits(True, image_size=16), 30), Sample(f"deep/{'long' * 30}", picture(7), (4, 2))]
    pack(packed, tmp_path / "ours", shard_samples=12, names=DIGITS)
    assert contents(tmp_path / "theirs") == contents(tmp_path / "ours")
