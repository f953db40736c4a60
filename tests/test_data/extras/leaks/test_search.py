"""The leak search finds planted copies of test images in training sets."""

import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity

from data.errors import DataError, ExitCode
from data.extras.leaks import matching, search
from data.extras.leaks.document import (
    Leaks,
    in_pairs,
    read_leaks,
)
from data.extras.leaks.search import find_leaks
from data.extras.leaks.signature import signature, trimmed
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.shards.subset import Rule
from data.extras.sources.samples import Sample
from data.images.preprocess import preprocess
from data.index.document import load_index
from data.index.index import Index
from data.reader import ShardReader
from jobs.__main__ import main
from pipeline.extras import leak_embedding
from tests.support.archives import make_subset
from tests.support.tars import write_tar
from tests.test_pipeline.checkpoints.test_disk_space import IN_A_NAME_SPACE, can_mount

ROOT = Path(__file__).parents[4]
SHARED = Path(__file__).parents[4].parent / "shared" / "images"


def picture(value: int) -> bytes:
    return cv2.imencode(".jpg", np.full((16, 16, 3), value, np.uint8))[1].tobytes()


def leaks_command(train: Index, test: Index, tmp_path: Path) -> int:
    """Run `jobs leaks` with the folder `leaks`; return the exit code."""
    words = ["leaks", str(train.tables), "--test", str(test.tables), "--output", str(tmp_path / "leaks")]
    return main([*words, "--workers", "1"])


def stop(done: int, total: int) -> None:
    """Kill the search when it reports its first finished shard."""
    raise KeyboardInterrupt


def small_set(folder, count: int = 7):
    samples = [Sample(f"s{number}", picture(10 * number), (number % 3,)) for number in range(count)]
    return pack(samples, folder, name="t", shard_samples=3)


# -------------------------------------------------------------------------------------------- the search


def painting(number: int) -> np.ndarray:
    """Return a distinct image (240, 320, 3) per number, with structure at every scale like photographs."""
    rng = np.random.default_rng(number)
    image = np.zeros((240, 320, 3))
    for side in (3, 6, 12, 24, 48):
        image += cv2.resize(rng.normal(size=(side, side, 3)), (320, 240), interpolation=cv2.INTER_CUBIC) * 3 / side
    return np.clip(128 + 60 * image / image.std(), 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray, quality: int = 85) -> bytes:
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def planted(image: np.ndarray, number: int) -> dict[str, bytes]:
    """Return copies of an image, each changed differently; sides of 0.8 are 64 % of the area."""
    rng = np.random.default_rng(number)
    height, width = image.shape[:2]
    y, x = (rng.uniform(0, 0.2, 2) * (height, width)).astype(int)
    crop = image[y : y + int(0.8 * height), x : x + int(0.8 * width)]
    return {
        "pixels": cv2.imencode(".png", cv2.imdecode(np.frombuffer(jpeg(image), np.uint8), 1))[1].tobytes(),
        "worse": jpeg(image, 50),
        "mirrored": jpeg(image[:, ::-1]),
        "smaller": jpeg(cv2.resize(image, (160, 100), interpolation=cv2.INTER_AREA)),
        "crop": jpeg(crop),
        "all": jpeg(cv2.resize(crop[:, ::-1], None, fx=0.7, fy=0.7, interpolation=cv2.INTER_AREA) // 2 + 60, 60),
    }


def found(leaks: Leaks) -> dict[tuple[str, str], str]:
    return {(pair.train[1], pair.test[1]): pair.kind for pair in leaks.pairs}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Return a test set of twelve paintings, and training sets with copies of the first four among other images."""
    tmp_path = tmp_path_factory.mktemp("sets")
    test = [Sample(f"t{number}", jpeg(painting(number)), (0,)) for number in range(12)]
    flat = jpeg(np.full((50, 50, 3), 77, np.uint8))
    test += [Sample("flat", flat, (0,)), Sample("torn", jpeg(painting(50))[:3000], (0,))]
    train = [Sample(f"other{number}", jpeg(painting(100 + number)), (0,)) for number in range(30)]
    for number in range(4):
        train += [Sample(f"{way}{number}", copy, (0,)) for way, copy in planted(painting(number), number).items()]
        train.append(Sample(f"bytes{number}", jpeg(painting(number)), (0,)))
    train.append(Sample("grey", cv2.imencode(".png", np.full((50, 50, 3), 77, np.uint8))[1].tobytes(), (0,)))
    train.append(Sample("flat-too", jpeg(np.full((60, 50, 3), 77, np.uint8)), (0,)))
    train.append(Sample("torn", b"\xff\xd8 none", (0,)))
    return pack(train, tmp_path / "train", shard_samples=20), pack(test, tmp_path / "test", shard_samples=5)


def expected() -> dict[tuple[str, str], str]:
    pairs = {("grey", "flat"): "exact"}
    for number in range(4):
        for way in ("bytes", "pixels", *planted(painting(0), 0)):
            pairs[f"{way}{number}", f"t{number}"] = "exact" if way in ("bytes", "pixels") else "perceptual"
    return pairs


@pytest.mark.parametrize("workers", [1, 2])
def test_search_finds_copies_crops_and_mirror_images_and_no_false_pairs(tmp_path, sets, workers, monkeypatch):
    train, test = sets
    leaks = find_leaks({"train": train}, {"test": test}, tmp_path / "leaks", workers=workers)
    assert found(leaks) == expected()
    assert {pair.distance for pair in leaks.pairs if pair.kind == "exact"} == {0.0}
    assert max(pair.distance for pair in leaks.pairs) < 0.1
    counts = {"train": 61, "train_undecodable": 1, "train_flat": 2, "test": 14, "test_undecodable": 1}
    assert leaks.looked_at == counts
    assert read_leaks(tmp_path / "leaks" / "leaks.json") == leaks
    assert [path.name for path in (tmp_path / "leaks").iterdir()] == ["leaks.json"]
    # With the sets swapped the pairs are the same; that test set shows the same picture eight times.
    monkeypatch.setattr(search, "MAX_SIMILAR_SHARE", 0.1)
    back = find_leaks({"test": test}, {"train": train}, tmp_path / "back")
    assert {(test_key, train_key): kind for (train_key, test_key), kind in found(back).items()} == expected()


def test_killed_search_resumes_with_the_remaining_shards(tmp_path, sets, monkeypatch):
    train, test = sets
    looked_at = []
    search_shard = search.search_shard

    def counted(shard, *settings):
        looked_at.append(shard.shards[0].name)
        return search_shard(shard, *settings)

    def stop_at_two(done, total):
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(search, "search_shard", counted)
    with pytest.raises(KeyboardInterrupt):
        find_leaks({"train": train}, {"test": test}, tmp_path / "leaks", report=stop_at_two)
    # The kill truncated the last line of the journal: its shard is searched again.
    journal = tmp_path / "leaks" / "leaks.partial"
    journal.write_text(journal.read_text()[:-20])
    remembered_at = {path: path.stat().st_mtime_ns for path in (tmp_path / "leaks").glob("signatures*/*.signatures")}
    assert len(remembered_at) == 3
    # A byte of one cached file has changed: only that file is computed again.
    rotten = sorted(remembered_at)[1]
    content = bytearray(rotten.read_bytes())
    content[len(content) // 2] ^= 4
    rotten.write_bytes(content)
    signed = []
    sign_shard = search.sign_shard
    monkeypatch.setattr(search, "sign_shard", lambda *job: (signed.append(job[1]), sign_shard(*job)))
    leaks = find_leaks({"train": train}, {"test": test}, tmp_path / "leaks")
    names = [shard.name for shard in train.shards]
    assert looked_at == [*names[:2], *names[1:]]
    assert signed == [rotten]
    assert found(leaks) == expected()
    # A search with another setting reuses nothing.
    with pytest.raises(KeyboardInterrupt):
        find_leaks({"train": train}, {"test": test}, tmp_path / "leaks", report=stop_at_two)
    looked_at.clear()
    find_leaks({"train": train}, {"test": test}, tmp_path / "leaks", fits=0.999)
    assert looked_at == names


@pytest.mark.skipif(not can_mount(), reason="needs Linux where a user may mount a tmpfs of his own")
def test_full_disk_ends_the_command_with_a_reason(tmp_path, sets):
    """Writing to a mapped file on a full disk would kill the process with SIGBUS, without a message."""
    train, test = sets
    command = [sys.executable, "-m", "jobs", "leaks", str(train.tables), "--test", str(test.tables), "--workers", "1"]
    disk = tmp_path / "disk"
    disk.mkdir()
    # 14 test images take 157 kB as entries, and the same again as arrays.
    script = f"mount -t tmpfs -o size=240k none {disk} && {shlex.join(command)} --output {disk}/leaks"
    done = subprocess.run([*IN_A_NAME_SPACE, "sh", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == ExitCode.IO, done.stderr
    assert "No space left on device" in done.stderr, done.stderr
    assert "signatures-" in done.stderr
    assert "free some space" in done.stderr


def sprite(number: int) -> np.ndarray:
    """Return a white disc or square on black, as in dSprites; size and position depend on the number."""
    rng = np.random.default_rng(number)
    image = np.zeros((64, 64), np.uint8)
    x, y = rng.integers(18, 46, 2).tolist()
    size = int(rng.integers(6, 16))
    if number % 2 == 0:
        cv2.circle(image, (x, y), size, 255, -1)
    else:
        image[y - size : y + size, x - size : x + size] = 255
    return image


def test_similar_test_images_are_compared_only_by_pixels(tmp_path, capsys):
    """Before, 389 of 900 pairs of unrelated shapes counted as copies, and `subset --but` would empty the set."""
    samples = [Sample(f"s{number}", cv2.imencode(".png", sprite(number))[1].tobytes(), (0,)) for number in range(40)]
    test = pack(samples[:30], tmp_path / "test")
    pixels = cv2.imencode(".bmp", cv2.cvtColor(sprite(7), cv2.COLOR_GRAY2BGR))[1].tobytes()
    pixels = cv2.imencode(".png", cv2.imdecode(np.frombuffer(pixels, np.uint8), cv2.IMREAD_COLOR))[1].tobytes()
    train = pack([*samples[30:], samples[3], Sample("seven", pixels, (0,))], tmp_path / "train")
    assert pixels != samples[7].image
    assert leaks_command(train, test, tmp_path) == ExitCode.DATA
    said = capsys.readouterr().err
    assert "of 435 pairs of different test images have similar low frequencies" in said
    assert "--fits 1" in said
    assert not (tmp_path / "leaks" / "leaks.json").exists()
    with pytest.raises(DataError, match="copies cannot be recognised by the look of the images"):
        find_leaks({"train": train}, {"test": test}, tmp_path / "leaks")
    # Compare the suggested workaround with the arrays themselves.
    leaks = find_leaks({"train": train}, {"test": test}, tmp_path / "leaks", fits=1.0)
    equal = set()
    for number in (*range(30, 40), 3, 7):
        for other in range(30):
            if np.array_equal(sprite(number), sprite(other)):
                equal.add((number, other))
    assert equal == {(3, 3), (7, 7)}
    assert found(leaks) == {("s3", "s3"): "exact", ("seven", "s7"): "exact"}


def test_share_of_similar_test_images_does_not_depend_on_their_order(monkeypatch):
    """Sixty paintings, four copies each: by hand, 60 × 6 of 240 × 239 / 2 pairs are equal, 1.26 %."""
    signatures = [signature(jpeg(painting(number))) for number in range(60)]
    fields = ("crops", "picture", "proportion")
    arrays = [np.stack([getattr(sign, name) for sign in signatures] * 4) for name in fields]
    assert search.similar_pairs_among(matching.TestSignatures(*arrays)) == (360, 28_680)
    # Every second image: 30 paintings, and twice the share.
    monkeypatch.setattr(search, "SAMPLED", 120)
    alike, compared = search.similar_pairs_among(matching.TestSignatures(*arrays))
    assert compared == 7140
    assert alike / compared == pytest.approx(360 / 28_680, rel=0.25)


def framed(image: np.ndarray, colour: int, top: int, bottom: int, left: int, right: int) -> np.ndarray:
    return cv2.copyMakeBorder(image, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(colour, colour, colour))


def test_search_finds_padded_framed_and_letterboxed_copies(tmp_path):
    """Single-colour borders, also nested ones, of up to a third of the sides."""
    test = pack([Sample(f"t{number}", jpeg(painting(number)), (0,)) for number in range(12)], tmp_path / "test")
    train = []
    for number in range(12):
        image = painting(number)
        train += [
            Sample(f"square{number}", jpeg(framed(image, 0, 40, 40, 0, 0), 60), (0,)),
            Sample(f"frame{number}", jpeg(framed(image, 255, 48, 48, 64, 64), 60), (0,)),
            Sample(f"one-side{number}", jpeg(framed(image[:, ::-1], 114, 0, 0, 0, 160)), (0,)),
            Sample(f"double{number}", jpeg(framed(framed(image, 0, 9, 9, 9, 9), 250, 30, 10, 20, 20)), (0,)),
        ]
    leaks = find_leaks({"train": pack(train, tmp_path / "train")}, {"test": test}, tmp_path / "leaks")
    ways = ("square", "frame", "one-side", "double")
    assert set(found(leaks)) == {(f"{way}{number}", f"t{number}") for number in range(12) for way in ways}


def test_borders_are_trimmed_exactly_and_images_never_vanish():
    inside = cv2.cvtColor(painting(5), cv2.COLOR_BGR2GRAY)
    assert np.array_equal(trimmed(inside), inside)
    rng = np.random.default_rng(3)
    for _ in range(20):
        sides = rng.integers(0, 90, 4).tolist()
        bordered = cv2.copyMakeBorder(inside, *sides, cv2.BORDER_CONSTANT, value=int(rng.integers(256)))
        noise = rng.integers(-3, 4, bordered.shape)  # as of an encoder
        noise[sides[0] : sides[0] + 240, sides[2] : sides[2] + 320] = 0
        assert np.array_equal(trimmed(np.clip(bordered + noise, 0, 255).astype(np.uint8)), inside)
    flat = np.full((50, 60), 9, np.uint8)
    small = framed(inside[:20, :20], 0, 100, 100, 100, 100)
    assert trimmed(flat).shape == (50, 60)
    assert trimmed(small).shape == (220, 220)


def test_pairs_name_the_right_one_of_several_sets(tmp_path, sets):
    train, test = sets
    few = make_subset(train, tmp_path / "few", Rule(part="-12:"))
    other = pack([Sample("t0", jpeg(painting(3)), (0,))], tmp_path / "other", name="test")
    leaks = find_leaks({"few": few, "t": test}, {"other": other, "test": test}, tmp_path / "leaks")
    of_copies = {(pair.train[1], pair.test_set, pair.test[1]) for pair in leaks.pairs if pair.train_set == 0}
    assert ("crop3", 0, "t0") in of_copies
    assert ("crop3", 1, "t3") in of_copies
    assert np.flatnonzero(in_pairs(leaks, other, "test")).tolist() == [0]
    # The second training set contains the test images themselves.
    assert int(in_pairs(leaks, test, "test").sum()) == 14


def test_command_writes_document_report_and_page(tmp_path, sets, capsys):
    train, test = sets
    assert leaks_command(train, test, tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"test  {test.tables}: 5 of 14 samples leak (35.714%)" in printed
    assert f"train {train.tables}: 29 of 61 samples leak" in printed
    assert "exact 9  perceptual 20" in printed
    page = (tmp_path / "leaks" / "leaks.html").read_text()
    assert page.count("<figure>") == 29
    assert "mirrored2" in page
    assert (tmp_path / "leaks" / "report.txt").read_text() in printed
    # Train without them, as suggested.
    assert f"--but {tmp_path}/leaks/leaks.json" in printed
    subset = ["subset", str(train.tables), "--but", f"{tmp_path}/leaks/leaks.json", "--output", str(tmp_path / "clean")]
    assert main(subset) == 0
    clean = find_leaks({"clean": load_index(tmp_path / "clean")}, {"test": test}, tmp_path / "again")
    assert clean.pairs == ()
    assert clean.looked_at["train"] == 32


def test_search_finds_planted_copies_of_photographs(tmp_path):
    """At least 99 % are found (table of benchmarks/leaks.py), and no two different photographs match."""
    paths = sorted(SHARED.glob("imagenet1k-*.tar"))
    if not paths:
        pytest.skip("photographs are absent: ../shared/images")
    photographs = build_index([str(paths[0])], output=tmp_path / "test", name="test")
    reader = ShardReader(photographs)
    train = []
    names = []
    for number in range(0, photographs.samples, 4):
        key, encoded, _ = reader.read(0, number)
        image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        for way, copy in planted(image, number).items():
            train.append(Sample(f"{way}-{number}", copy, (0,)))
            names.append((f"{way}-{number}", key))
    copies = pack(train, tmp_path / "train", shard_samples=100)
    leaks = find_leaks({"train": copies}, {"test": photographs}, tmp_path / "leaks")
    assert set(found(leaks)) <= set(names)
    assert len(found(leaks)) >= 0.99 * len(names)


def test_command_prints_how_to_exclude_the_leaks_of_each_training_set(tmp_path, capsys):
    test = small_set(tmp_path / "test", 3)
    first = small_set(tmp_path / "first", 2)
    clean = pack([Sample("s", picture(200), (0,))], tmp_path / "none")
    last = small_set(tmp_path / "last", 3)
    by_file = f"{last.tables}/t.index.json"
    words = ["--test", str(test.tables), "--output", str(tmp_path / "leaks"), "--workers", "1"]
    assert main(["leaks", f"{first.tables}/", str(clean.tables), by_file, *words]) == 0
    advice = [line.split("jobs ")[1] for line in capsys.readouterr().out.splitlines() if "without the leaks" in line]
    assert advice == [
        f"subset {first.tables}/ --but {tmp_path}/leaks/leaks.json --output {first.tables}-clean",
        f"subset {by_file} --but {tmp_path}/leaks/leaks.json --output {last.tables}/t-clean",
    ]


def test_leaked_sample_with_a_key_that_is_not_utf8_is_reported_and_excluded(tmp_path, capsys):
    """A Latin-1 name, as in foreign archives; its two neighbours have text keys."""
    members = [(f"{key}.jpg", picture(value)) for key, value in (("a", 10), ("caf\udce9", 20), ("z", 30))]
    labels = [(name.replace(".jpg", ".cls"), b"0") for name, _ in members]
    tar = write_tar(tmp_path / "t.tar", sorted(members + labels))
    train = build_index([str(tar)], output=tmp_path / "train", name="train")
    assert b"caf\xe9" in train.table(0)["key"].tolist()
    test = pack([Sample("same", picture(20), (0,))], tmp_path / "test")
    assert leaks_command(train, test, tmp_path) == 0
    assert "1 of 3 samples leak" in capsys.readouterr().out
    assert (tmp_path / "leaks" / "leaks.html").read_text().count("<figure>") == 1
    clean = make_subset(train, tmp_path / "clean", Rule(but=str(tmp_path / "leaks" / "leaks.json")))
    assert clean.table(0)["key"].tolist() == [b"a", b"z"]


class Thumb(torch.nn.Module):
    """Replaces a model: its features are the image at 4 × 4 pixels."""

    config = SimpleNamespace(image_size=(16, 24))

    def features(self, images):
        return torch.nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)


def test_features_find_more_pairs_than_pixels_and_a_killed_search_resumes(tmp_path, sets):
    """Compares with scikit-learn's cosine similarity of features computed again by this test."""
    train, test = sets
    args = (Thumb(), ("w", "d" * 64), [train], [test], tmp_path / "leaks")
    options = {"cosine": 0.9, "device": torch.device("cpu")}
    with pytest.raises(KeyboardInterrupt):
        leak_embedding.find_similar(*args, **options, report=stop)
    left = []
    embeddings = leak_embedding.find_similar(*args, **options, report=lambda done, total: left.append(total))
    assert left == [len(train.shards) - 1] * (len(train.shards) - 1)
    leaks = find_leaks({"train": train}, {"test": test}, tmp_path / "leaks", embeddings=embeddings)
    assert leaks.settings["embedding"] == {"weights": "w", "digest": "d" * 64, "cosine": 0.9}
    assert expected().items() <= found(leaks).items(), "pairs of the pixels stay what they are"

    train_keys, train_features = thumbs(train)
    test_keys, test_features = thumbs(test)
    cosines = cosine_similarity(train_features, test_features)
    alike = {(train_keys[row], test_keys[column]) for row, column in np.argwhere(cosines >= 0.9)}
    distances = [match.distance for record in embeddings.records.values() for match in record.matches]
    assert sorted(distances) == pytest.approx(sorted(np.maximum(0, 1 - cosines[cosines >= 0.9])), abs=1e-4)
    by_features = {pair for pair, kind in found(leaks).items() if kind == "embedding"}
    assert by_features == alike - expected().keys()
    assert by_features


def test_journal_of_a_killed_search_of_other_sets_is_ignored(tmp_path):
    other = small_set(tmp_path / "other", 4)
    train = pack([Sample("copy", picture(20), (0,)), Sample("x", picture(90), (0,))], tmp_path / "train")
    test = small_set(tmp_path / "test")
    folder = tmp_path / "leaks"
    options = {"cosine": 0.999, "device": torch.device("cpu")}
    leak_embedding.find_similar(Thumb(), ("w", "d" * 64), [other], [test], folder, **options)
    with pytest.raises(KeyboardInterrupt):
        find_leaks({"other": other}, {"test": test}, folder, report=stop)
    left = [len((folder / name).read_text().splitlines()) for name in ("leaks.partial", "embedding.partial")]
    assert left == [2, 3], "a line for the setting, and one a shard"
    embeddings = leak_embedding.find_similar(Thumb(), ("w", "d" * 64), [train], [test], folder, **options)
    leaks = find_leaks({"train": train}, {"test": test}, folder, embeddings=embeddings)
    assert found(leaks)["copy", "s2"] == "exact"
    assert {train_key for train_key, _ in found(leaks)} == {"copy", "x"}
    assert leaks.looked_at["train"] == 2


def thumbs(index) -> tuple[list[str], np.ndarray]:
    reader = ShardReader(index)
    keys = []
    features = []
    for shard, samples in enumerate(index.shard_samples):
        for sample in range(samples):
            key, encoded, _ = reader.read(shard, sample)
            image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
            if image is not None and "torn" not in key:
                image = preprocess(image, "resize((16, 24))") / 127.5 - 1
                pooled = image.reshape(4, 4, 4, 6, 3).mean((1, 3))  # 16 × 24 in 4 × 4 cells
                keys.append(key)
                features.append(pooled.transpose(2, 0, 1).ravel())
    return keys, np.stack(features)
