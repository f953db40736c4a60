"""Packing and indexing report skipped, lost and merged members, even with very many or very odd names.

As the reference, `webdataset` reads the same tars: the tests compare the members that it skips, duplicates or stops at.
"""

import json
import random
import shlex
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data.errors import DataError
from data.extras.shards.indexing import build_index, local_tars
from data.extras.shards.packing import pack
from data.extras.sources.refusals import MAX_TYPES
from data.extras.sources.samples import Sample
from data.index.document import load_index
from data.reader import ShardReader
from jobs.__main__ import main
from tests.support.shards import digits, write_set
from tests.support.tars import picture, write_tar


def samples(first: int, count: int) -> list[tuple[str, bytes]]:
    members = []
    for number in range(first, first + count):
        members += [(f"{number}.jpg", picture(number)), (f"{number}.cls", str(number % 3).encode())]
    return members


def read_by_webdataset(path: Path) -> list[dict]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))


def test_any_number_of_odd_names_is_summarised_in_a_few_lines(tmp_path, capsys):
    """Before, 100,000 odd names gave 100,001 lines and an index of 3.3 MB."""
    for shard in range(2):
        odd = [(f"x{number}.e{number}s{shard}", b"") for number in range(1000)]
        write_tar(tmp_path / f"t{shard}.tar", [*samples(0, 2), *odd])
    assert main(["index", str(tmp_path), "--name", "t"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20
    assert (tmp_path / "t.index.json").stat().st_size < 5000
    assert "refused: 1 × member type .e0s0, first x0.e0s0 of t0.tar" in lines
    assert f"refused: {2000 - MAX_TYPES:,} × member of another type, first x{MAX_TYPES}" in "\n".join(lines)
    assert load_index(tmp_path).refused.counts.total() == 2000


def test_separated_images_and_labels_are_joined(tmp_path):
    """Before, each half became a separate bad sample; webdataset still reads them so."""
    members = samples(0, 5)
    path = write_tar(tmp_path / "t.tar", [*members[::2], *members[1::2]])
    assert [set(sample) & {"jpg", "cls"} for sample in read_by_webdataset(path)] == [{"jpg"}] * 5 + [{"cls"}] * 5
    index = build_index(tmp_path, name="t")
    assert index.class_counts == (2, 2, 1)
    assert not index.refused.counts
    reader = ShardReader(index)
    expected = [(str(n), picture(n), str(n % 3).encode()) for n in range(5)]
    assert [reader.read(0, sample) for sample in range(index.samples)] == expected


@pytest.mark.parametrize("size", [3, 40])
def test_a_tar_whose_tail_is_zeros_is_refused(tmp_path, capsys, size):
    """webdataset reads the members before the zeros, and takes the zeros for the end."""
    kept = samples(0, size // 2)
    cut = sum(512 + -(-len(body) // 512) * 512 for _, body in kept)  # start of the next member
    whole = write_tar(tmp_path / "t.tar", samples(0, size)).read_bytes()
    (tmp_path / "t.tar").write_bytes(whole[:cut] + bytes(max(len(whole) - cut, 20_000)))
    assert len(read_by_webdataset(tmp_path / "t.tar")) == size // 2
    assert main(["index", str(tmp_path), "--name", "t"]) == 65
    assert f"only zeros after byte {cut}, " in capsys.readouterr().err
    assert not (tmp_path / "t.index.json").exists()
    assert main(["pack", "tars", str(tmp_path), str(tmp_path / "packed")]) == 65


@pytest.mark.parametrize("blocks", [1, 20, 64, 2048])
def test_the_zeros_that_writers_of_tars_leave_are_no_lost_samples(tmp_path, blocks):
    """GNU tar pads the last record, whose size --blocking-factor sets; Python's tarfile uses 20 blocks."""
    content = write_tar(tmp_path / "t.tar", samples(0, 3)).read_bytes().rstrip(b"\0")
    size = -(-len(content) // 512) * 512 + 1024
    record = 512 * blocks
    (tmp_path / "t.tar").write_bytes(content.ljust(-(-size // record) * record, b"\0"))
    assert build_index(tmp_path, name="t").samples == 3


def test_tars_that_were_appended_to_each_other_are_refused(tmp_path, capsys):
    """webdataset reads only the first of them."""
    first = write_tar(tmp_path / "a.tar", samples(0, 3)).read_bytes()
    second = write_tar(tmp_path / "b.tar", samples(3, 3)).read_bytes()
    (tmp_path / "b.tar").unlink()
    (tmp_path / "a.tar").write_bytes(first + second)
    assert len(read_by_webdataset(tmp_path / "a.tar")) == 3
    assert main(["index", str(tmp_path), "--name", "t"]) == 65
    assert f"more bytes follow at byte {len(first)}" in capsys.readouterr().err


@pytest.mark.parametrize("beside", ["b.tar.gz", "b.tgz", "b.TAR", "below/b.tar"])
def test_error_names_the_tars_that_would_be_ignored(tmp_path, capsys, beside):
    write_tar(tmp_path / "a.tar", samples(0, 3))
    (tmp_path / "below").mkdir()
    (tmp_path / beside).write_bytes(b"")
    apart = str(tmp_path.with_name(f"{tmp_path.name}-set"))
    for command in (["index", str(tmp_path), "--name", "t"], ["pack", "tars", str(tmp_path), apart]):
        assert main(command) == 65
        problem = capsys.readouterr().err
        assert f"'{beside}'" in problem
        assert "would be ignored" in problem
    assert main(["index", str(tmp_path / "a.tar"), "--name", "t"]) == 0, "whoever names the tars means those"


def test_data_set_without_usable_samples_ends_with_an_error(tmp_path, capsys):
    cases = {
        "text": ([("a.txt", b"x")], "0 samples"),
        "pages": ([("a.jpg", b"<html>"), ("a.cls", b"1")], "could be decoded as an image"),
        "labels": ([("a.jpg", picture(1))], "no sample has a usable label"),
    }
    for name, (members, reason) in cases.items():
        write_tar(tmp_path / f"{name}.tar", members)
        assert main(["index", str(tmp_path / f"{name}.tar"), "--name", name]) == 65, name
        assert reason in capsys.readouterr().err


def test_indexing_decodes_a_few_samples_of_each_shard_and_counts_those_that_fail(tmp_path, capsys):
    members = dict(samples(0, 12)) | {"4.jpg": b"<html>404"}
    write_tar(tmp_path / "a.tar", list(members.items()))
    write_tar(tmp_path / "b.tar", samples(0, 12))
    (tmp_path / "c.tar").write_bytes((tmp_path / "b.tar").read_bytes().replace(picture(1), picture(1)[::-1]))
    assert main(["index", str(tmp_path), "--name", "t"]) == 0
    said = capsys.readouterr().out
    assert "16.7% of them are not images" in said
    assert "refused: 2 × looked at, and not a JPEG, PNG or WebP, first" in said
    first = json.loads((tmp_path / "t.index.json").read_text())["first_refused"]
    # All headers are read, and some samples are decoded.
    assert first == dict.fromkeys(["not a JPEG, PNG or WebP", "looked at, and not a JPEG, PNG or WebP"], "4 of a.tar")
    assert "refused: 2 × not a JPEG, PNG or WebP, first" in said


def test_an_altered_table_ends_a_reading_and_the_doctor_names_it(tmp_path, capsys):
    """Before, a table with shifted labels gave 25 of 50 wrong labels, and `data check` reported no error."""
    made = pack([Sample(f"s{n}", picture(n), (n % 2,)) for n in range(50)], tmp_path / "set", name="set")
    path = tmp_path / "set" / "set-000000.npy"
    table = np.load(path)
    table["label"] = np.roll(table["label"], 1)
    np.save(path, table)
    with pytest.raises(DataError, match=r"its sha256 is .*altered or replaced"):
        ShardReader(made).read(0, 0)
    assert main(["data", "check", str(tmp_path / "set")]) == 65
    assert "altered or replaced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{}/set", ("{}/set", {"a.tar": 1, "b.tar": 2})),
        (["{}/set/b.tar", "{}/other/c.tar"], ("{}", {"set/b.tar": 2, "other/c.tar": 3})),
        (["{}/set/../set/b.tar"], ("{}/set", {"b.tar": 2})),
        ([], "no \\*.tar was given"),
        ("{}/empty", "no \\*.tar here"),
        ("{}/set/a.tar", "not a \\*.tar"),
        ("{}/absent", "this folder does not exist"),
        (["{}/set/a.tar", "{}/set/z.tar"], "1 of 2 shards do not exist: .*/set/z.tar$"),
    ],
)
def test_the_tars_of_a_source_are_listed_from_the_folder_that_they_share(source, found, tmp_path):
    for name, size in (
        ("set/a.tar", 1),
        ("set/b.tar", 2),
        ("other/c.tar", 3),
        ("empty/readme.txt", 4),
        ("set/.d.tar", 5),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    given = [name.format(tmp_path) for name in source] if isinstance(source, list) else source.format(tmp_path)
    if isinstance(found, str):
        with pytest.raises(DataError, match=found):
            local_tars(given)
    else:
        tars = local_tars(given)
        assert (str(tars.directory), tars.sizes) == (found[0].format(tmp_path), found[1])


def test_tars_are_indexed_in_place_and_no_copy_remains(faulty, local, tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("data.remote.urls.random.uniform", lambda low, high: 0)
    chance = random.Random(0)
    faulty.fault = lambda path: 503 if chance.random() < 0.3 else None
    for number, source in enumerate(
        (faulty.set, [f"{faulty.set}/*.tar"], [f"{faulty.set}/train-{{000000..000007}}.tar"])
    ):
        index = build_index(source, output=tmp_path / str(number), workers=2)
        assert (index.digest, index.directory) == (local.digest, faulty.set)
        assert np.array_equal(index.table(3), local.table(3))
    assert not list((tmp_path / "cache" / "patchline" / "shards").glob("*.[!l]*")), "a copy stays"


def test_compressed_tars_next_to_plain_ones_are_not_ignored_silently(faulty, tmp_path):
    mixed = faulty.set.replace("/set", "/mixed")
    with pytest.raises(DataError, match=r"/mixed: 'b\.tar\.gz' are compressed tars and would be ignored"):
        build_index(mixed, output=tmp_path)
    assert len(build_index(f"{mixed}/*.tar", output=tmp_path).shards) == 1


def test_index_command_stopped_by_the_storage_resumes_without_downloading_again(
    faulty, local, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("data.remote.urls.random.uniform", lambda low, high: 0)
    command = ["index", faulty.set, "--output", str(tmp_path / "index"), "--name", "train"]
    faulty.fault = lambda path: 503 if "000005" in path else None
    assert main(command) == 69
    assert f"{faulty.set}/train-000005.tar: no response after 8 attempts" in capsys.readouterr().err
    faulty.fault = lambda path: None
    faulty.gets.clear()
    assert main(command) == 0
    assert len(faulty.gets) == 3
    assert f"400 samples in 8 shards, 10 classes, digest {local.digest[:12]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["s3://images/set", "/data/set"], "expected only URLs"),
        (["https://host/set"], "files cannot be listed over https"),
        (["https://user:secret@host/a.tar"], "https://host/a.tar: the index would store the password or signature"),
        (["https://host/a.tar?sig=secret"], "https://host/a.tar: the index would store the password or signature"),
        (["pipe://host/a.tar"], "is not supported"),
        (["https://host/set//a.tar"], "https://host/set//a.tar: some clients treat two consecutive slashes as one"),
    ],
)
def test_urls_that_cannot_be_indexed_are_refused(tmp_path, source, message):
    with pytest.raises(DataError, match=message) as error:
        build_index(source, output=tmp_path)
    assert "secret" not in str(error.value)


def test_a_key_in_the_url_that_runs_read_from_is_refused_too(local, tmp_path):
    for at, message in (
        ("s3://me:secret@b/set", "the index would store the password or signature"),
        ("http://host/set", "is not supported"),
    ):
        with pytest.raises(DataError, match=message) as error:
            build_index(local.directory, output=tmp_path, at=at)
        assert "secret" not in str(error.value)
        assert not list(tmp_path.iterdir())


def test_suggested_command_recreates_an_index_of_tars_in_several_folders(tmp_path):
    made = write_set(islice(digits(True, image_size=16), 50), tmp_path / "set", shard_samples=20)
    paths = []
    for number in range(3):
        folder = tmp_path / f"part {number}"
        folder.mkdir()
        paths.append(str(Path(made.location(number)).rename(folder / "0.tar")))
    index = build_index(paths, output=tmp_path / "index", name="parts")
    (tmp_path / "index" / "part 1--0.npy").unlink()
    with pytest.raises(DataError, match=r"part 1--0.npy: not a valid table of part 1/0.tar") as caught:
        ShardReader(index).read(1, 0)
    assert main(shlex.split(str(caught.value).partition("\n  run ")[2])[3:]) == 0
    assert load_index(tmp_path / "index") == index
    assert ShardReader(index).read(1, 0)
