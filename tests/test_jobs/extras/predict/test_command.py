"""Arguments and weights that `predict` refuses."""

import models
from jobs.__main__ import main
from tests.support.photos import make_photos, save_model


def test_outputs_images_and_weights_that_cannot_be_used_are_refused_by_name(tmp_path, capsys):
    photos = str(make_photos(tmp_path / "photos"))
    weights = save_model(tmp_path)
    assert main(["predict", weights, photos, "--output", "out.txt"]) == 64
    assert "pass --output out.csv" in capsys.readouterr().err
    assert main(["predict", weights, f"{photos}/notes.txt"]) == 64
    assert main(["predict", weights, f"{photos}/absent.png"]) == 64
    models.save(models.build("mu/8", 16, 0), tmp_path / "headless")
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "headless"), photos, "--output", str(tmp_path / "out.csv")]) == 64
    assert "has no classification head" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


def test_existing_predictions_are_replaced_only_with_force(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos = str(make_photos(tmp_path / "photos"))
    weights = save_model(tmp_path)
    (tmp_path / "predictions.html").write_text("mine")
    assert main(["predict", weights, photos]) == 64
    assert "predictions.html already exists; nothing was written\n  add --force" in capsys.readouterr().err
    assert not (tmp_path / "predictions.csv").exists()
    assert (tmp_path / "predictions.html").read_text() == "mine"
    assert main(["predict", weights, photos, "--force"]) == 0
    assert (tmp_path / "predictions.html").read_text() != "mine"
    assert main(["predict", weights, photos]) == 64
    assert "predictions.csv and predictions.html already exist; nothing" in capsys.readouterr().err
