"""Compressed WebDataset tars are packed anew as plain tars are."""

import gzip
import lzma
from pathlib import Path

from data.index.document import load_index
from data.shards.reader import ShardReader
from jobs.__main__ import main
from tests.archives import picture, tar_bytes


def contents(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """Image and label of every sample of a packed set, by its key."""
    index = load_index(folder)
    reader = ShardReader(index)
    samples = {}
    for shard, count in enumerate(index.shard_samples):
        for sample in range(count):
            key, image, label = reader.read(shard, sample)
            samples[key] = (image, label)
    return samples


def packed(tmp_path: Path, path: Path) -> dict[str, tuple[bytes, bytes]]:
    """What `jobs pack` makes of tars."""
    output = tmp_path / f"set{len(list(tmp_path.glob('set*')))}"
    assert main(["pack", "tars", str(path), str(output)]) == 0
    return contents(output)


def test_compressed_webdataset_tars_are_packed_as_the_plain_ones_are(tmp_path, caplog):
    files = {}
    for number in range(4):
        files |= {f"{number}.jpg": picture(number), f"{number}.cls": b"%d" % (number % 2), f"{number}.txt": b"hello"}
    half = {"lonely.jpg": picture(9)}
    for suffix, compress in ((".tar", bytes), (".tar.gz", gzip.compress), (".tar.xz", lzma.compress)):
        (tmp_path / suffix).mkdir()
        (tmp_path / suffix / f"train{suffix}").write_bytes(compress(tar_bytes({**files, **half})))
    plain = packed(tmp_path, tmp_path / ".tar")
    assert plain == {f"train/{number}": (picture(number), b"%d" % (number % 2)) for number in range(4)}
    for path in (tmp_path / ".tar.gz", tmp_path / ".tar.xz", tmp_path / ".tar.gz" / "train.tar.gz"):
        caplog.clear()
        assert packed(tmp_path, path) == plain
        assert "1 × no label, first lonely of train" in caplog.text
