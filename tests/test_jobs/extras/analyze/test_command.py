"""Arguments and images that `analyze` refuses."""

from jobs.__main__ import main
from tests.support.photos import make_photos, save_model


def test_models_and_images_that_cannot_be_analysed_are_refused_by_name(tmp_path, capsys):
    photos = make_photos(tmp_path / "photos")
    output = ["--output", str(tmp_path / "out")]
    assert main(["analyze", save_model(tmp_path / "axial", "Axial-mu/8", 16), str(photos), *output]) == 64
    assert "found family axial" in capsys.readouterr().err
    weights = save_model(tmp_path)
    assert main(["analyze", weights, str(photos / "notes.txt"), *output]) == 64
    assert "expected image files (jpg, jpeg, png, webp), folders of images or tar shards" in capsys.readouterr().err
    assert main(["analyze", weights, str(photos), *output, "--limit", "0"]) == 64
    assert main(["analyze", weights, str(photos), "--output", str(photos / "notes.txt")]) == 64
    assert f"--output {photos / 'notes.txt'} is a file" in capsys.readouterr().err
    assert main(["analyze", weights, str(photos / "absnt.png"), *output]) == 64
    assert main(["analyze", weights, str(photos / "absent.png"), *output]) == 64
    (photos / "0.png").write_bytes(b"broken")
    assert main(["analyze", weights, str(photos / "0.png"), *output]) == 65
    assert "none of the 1 images can be read; the first is " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["analyze", weights, str(photos), *output]) == 0
    assert f"skipped 1 unreadable images; the first is {photos}/0.png: not a JPEG" in capsys.readouterr().out
