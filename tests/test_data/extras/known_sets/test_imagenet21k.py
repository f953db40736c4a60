"""ImageNet-21k is read from its archive, from class tars, and from class folders."""

import os

import pytest

from data.extras.sources.members import members
from data.index.document import load_index
from jobs.__main__ import main
from tests.support import archives
from tests.support.archives import contents, packed, picture, tar_bytes, write_folder

pytestmark = pytest.mark.quick


def test_imagenet_21k_reads_archive_class_tars_and_class_folders(tmp_path, capsys, caplog):
    tars = archives.class_tars()
    winter = archives.write_tar_gz(
        tmp_path / "winter21_whole.tar.gz",
        {"winter21_whole/README": b"hi", **{f"winter21_whole/{k}": v for k, v in tars.items()}},
    )
    (tmp_path / "fall11_whole.tar").write_bytes(tar_bytes(tars))
    write_folder(tmp_path / "tars" / "winter21_whole", tars)
    for name in tars:
        for member in members(tmp_path / "tars" / "winter21_whole" / name):
            write_folder(tmp_path / "folders" / name.removesuffix(".tar"), {member.name: member.read()})
    by_hand = {
        f"{wnid}_{n}": (picture(50 * i + n), b"%d" % i) for i, wnid in enumerate(archives.WNIDS) for n in range(3)
    }
    for path in (winter, tmp_path / "tars", tmp_path / "folders"):
        assert packed(tmp_path, "imagenet-21k", path) == by_hand
    assert packed(tmp_path, "imagenet-21k-fall11", tmp_path / "fall11_whole.tar") == by_hand
    assert load_index(tmp_path / "set0").names == archives.WNIDS
    assert next(iter(contents(tmp_path / "set0"))) == "n02096294_0", "in the order of the archive"
    assert "1 × file outside the class tars and class folders, first winter21_whole/README" in caplog.text
    assert "reading the whole archive to list its classes" in caplog.text
    caplog.clear()
    (tmp_path / "wnids.txt").write_text("\n".join(archives.WNIDS))
    listed = ["--wnids", str(tmp_path / "wnids.txt")]
    os.utime(winter)  # as if it had not been looked at before
    assert packed(tmp_path, "imagenet-21k", winter, *listed) == by_hand
    assert "reading the whole archive" not in caplog.text
    (tmp_path / "wnids.txt").write_text("\n".join(archives.WNIDS[1:]))
    assert main(["pack", "imagenet-21k", str(winter), str(tmp_path / "OUT"), *listed, "--partial"]) == 65
    assert "n01440764 is not one of the 2 classes" in capsys.readouterr().err
    assert main(["pack", "imagenet-21k", str(winter), str(tmp_path / "OUT")]) == 65
    assert "imagenet-21k, train: found 3 classes, expected 13,153,500 samples of 19,167" in capsys.readouterr().err
