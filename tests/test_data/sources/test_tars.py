"""Compressed WebDataset tars are packed anew as plain tars are."""

import gzip
import lzma

from tests.archives import packed, picture, tar_bytes


def test_compressed_webdataset_tars_are_packed_as_the_plain_ones_are(tmp_path, caplog):
    files = {}
    for number in range(4):
        files |= {f"{number}.jpg": picture(number), f"{number}.cls": b"%d" % (number % 2), f"{number}.txt": b"hello"}
    half = {"lonely.jpg": picture(9)}
    for suffix, compress in ((".tar", bytes), (".tar.gz", gzip.compress), (".tar.xz", lzma.compress)):
        (tmp_path / suffix).mkdir()
        (tmp_path / suffix / f"train{suffix}").write_bytes(compress(tar_bytes({**files, **half})))
    plain = packed(tmp_path, "tars", tmp_path / ".tar")
    assert plain == {f"train/{number}": (picture(number), b"%d" % (number % 2)) for number in range(4)}
    for path in (tmp_path / ".tar.gz", tmp_path / ".tar.xz", tmp_path / ".tar.gz" / "train.tar.gz"):
        caplog.clear()
        assert packed(tmp_path, "tars", path) == plain
        assert "1 × no label, first lonely of train" in caplog.text
