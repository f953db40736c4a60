"""From image file to logits: timm and transformers compute with an export what our evaluation computes."""

import json
import math
from pathlib import Path

import cv2
import numpy as np
import pytest
import sklearn.datasets
import torch
from PIL import Image

import models
from data.images.decode import decode
from data.images.preprocess import preprocess
from jobs.__main__ import main
from models.catalog import normalise
from models.extras.weights.preprocessing import REMAINING, for_hf, for_timm, from_hf, from_timm
from pipeline.architecture import preprocessing_of
from tests.support.foreign_vits import save_timm, transformers_model
from tests.support.weights import random_model

PHOTOS = Path(sklearn.datasets.__file__).parent / "images"  # of scikit-learn, 640×427
SQUASHED = "resize((224, 224))"
EXACT = "resize(224, antialias=True)"
CROPPED = "resize_small(256)|central_crop(224)"
LEVEL = 2 / 255  # of pixels from −1 to 1: one number of 0 … 255. Pillow rounds twice where ours truncates once.


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Write photographs that evaluation shrinks, and one that it enlarges."""
    small = tmp_path_factory.mktemp("files") / "small.png"
    cv2.imwrite(str(small), cv2.resize(cv2.imread(str(PHOTOS / "china.jpg")), (200, 150), interpolation=cv2.INTER_AREA))
    return {"china": PHOTOS / "china.jpg", "flower": PHOTOS / "flower.jpg", "small": small}


def exported(ops: str | None, format: str, tmp_path: Path, **config) -> tuple[torch.nn.Module, Path]:
    """Export sealed weights with the preprocessing of these ops; return their folder and the command's output."""
    # With its first values a model answers smoothly to its pixels; the head alone is zero.
    torch.manual_seed(3)
    model = models.build("mu/16", **{"image_size": 224, "classes": 5, **config}).eval()
    torch.nn.init.normal_(model.head.weight)
    recorded = preprocessing_of(ops, model.config)
    models.save(model, tmp_path / "ours", preprocessing=recorded)
    assert models.load_preprocessing(tmp_path / "ours") == recorded
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / format), "--format", format]) == 0
    return model, tmp_path / format


def ours(file: Path, ops: str) -> np.ndarray:
    pixels = preprocess(decode(file.read_bytes()), ops).astype(np.float32) / 127.5 - 1
    return pixels.transpose(2, 0, 1)


def logits_of(model: torch.nn.Module, pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        outputs = model(torch.from_numpy(np.asarray(pixels))[None])
    return getattr(outputs, "logits", outputs).numpy()[0]


def opened(library, format: str, folder: Path):
    """Load a library's model and image preprocessing from an exported folder."""
    if format == "hf":
        processor = library.AutoImageProcessor.from_pretrained(folder)
        theirs = library.ViTForImageClassification.from_pretrained(folder).eval()
        return theirs, lambda image: processor(image, return_tensors="np")["pixel_values"][0]
    from timm.data import create_transform, resolve_model_data_config

    theirs = library.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(theirs), is_training=False)
    return theirs, lambda image: transform(image).numpy()


@pytest.mark.parametrize("format", ["timm", "hf"])
@pytest.mark.parametrize(
    "ops", [None, EXACT, "resize_tf1(224)", CROPPED, "resize(448, antialias=True)|central_crop(224)"]
)
def test_an_image_file_becomes_the_same_pixels_and_logits(ops, format, files, tmp_path, request, capsys):
    library = request.getfixturevalue({"timm": "timm", "hf": "transformers"}[format])
    model, folder = exported(ops, format, tmp_path)
    theirs, pixels_of = opened(library, format, folder)
    ops = ops or SQUASHED
    remaining = REMAINING[preprocessing_of(ops, model.config).interpolation]
    remarks = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    assert [f"differ (by {remaining} of −1 … 1 on average" in line for line in remarks] == [True] * bool(remaining)
    for name, file in files.items():
        expected = ours(file, ops)
        found = pixels_of(Image.open(file).convert("RGB"))
        difference = abs(found - expected)
        assert found.shape == expected.shape == (3, 224, 224)
        # What the filters leave is what the export says; enlarged, or by the same filter, a rounding.
        assert difference.mean() <= remaining + LEVEL, (name, difference.mean())
        if not remaining or (name == "small" and ops == SQUASHED):
            assert difference.max() <= 2 * LEVEL + 1e-6, (name, difference.max())
        right = logits_of(model, expected)
        apart = abs(logits_of(theirs, found) - right).max()
        # What the same weights were taken to mean before: a crop by timm, and a squash by transformers.
        mistaken = ours(file, SQUASHED) if "crop" in ops else cropped(file)
        wrong = abs(logits_of(model, mistaken) - right).max()
        # Unlike trained weights, untrained ones react to every edge, and the filters differ mainly at edges.
        assert apart < (0.65 if remaining else 0.1) * wrong, (name, apart, wrong)


def test_every_preprocessing_of_timm_makes_its_own_pixels(timm, files):
    """Tests all distinct settings of timm's pretrained ViTs on a photograph."""
    from timm.data import create_transform

    settings = {}
    for name in timm.list_models(module=["vision_transformer", "eva", "deit", "beit"], pretrained=True):
        cfg = timm.get_pretrained_cfg(name).to_dict()
        fields = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
        settings.setdefault(tuple(cfg[field] for field in fields), {field: cfg[field] for field in fields})
    assert len(settings) > 40
    refused = []
    for described in settings.values():
        try:
            recorded = from_timm(described, described["input_size"][1:])
        except ValueError as error:
            refused.append(str(error))
            continue
        expected = create_transform(**described, is_training=False)(Image.open(files["china"]).convert("RGB"))
        pixels = preprocess(decode(files["china"].read_bytes()), recorded.ops).astype(np.float64) / 255
        found = ((pixels - recorded.mean) / recorded.std).transpose(2, 0, 1)
        assert abs(found - expected.numpy()).max() < 1e-5, described
        # And back: the same settings, apart from the interpolation that timm chooses at random in training.
        told = for_timm(recorded)
        assert from_timm(told, recorded.size) == recorded
    assert len(refused) <= 2
    assert all("crop_mode border" in reason for reason in refused)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ViTImageProcessor", {}),
        ("CLIPImageProcessor", {}),
        ("BitImageProcessor", {"size": {"shortest_edge": 256}, "image_mean": [0.485, 0.456, 0.406]}),  # DINOv2
        ("SiglipImageProcessor", {}),
        ("DeiTImageProcessor", {}),
        ("BeitImageProcessor", {}),
        ("DINOv3ViTImageProcessor", {}),
    ],
)
def test_every_image_processor_makes_its_own_pixels(kind, fields, transformers, files, tmp_path):
    processor = getattr(transformers, kind)(**fields)
    processor.save_pretrained(tmp_path)
    recorded = models.load_preprocessing(tmp_path)
    for name, file in files.items():
        expected = processor(Image.open(file).convert("RGB"), return_tensors="np")["pixel_values"][0]
        pixels = preprocess(decode(file.read_bytes()), recorded.ops).astype(np.float64) / 255
        found = ((pixels - recorded.mean) / recorded.std).transpose(2, 0, 1)
        # torchvision and Pillow round differently: by one level of 255 when they shrink, and by two when they enlarge.
        levels = abs(found - expected) * 255 * np.array(recorded.std)[:, None, None]
        assert levels.max() < (2.01 if name == "small" else 1.01), name
    assert from_hf(for_hf(recorded)) == recorded


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (
            {"image_processor_type": "FlavaImageProcessor"},
            "FlavaImageProcessor is not supported; expected one of ViT, CLIP",
        ),
        ({"image_processor_type": "ViTImageProcessor", "do_resize": False}, "do_resize or do_rescale is false"),
        ({"image_processor_type": "ViTImageProcessor", "rescale_factor": 1.0}, "rescale_factor is 1.0, expected 1/255"),
        ({"image_processor_type": "ViTImageProcessor", "resample": 4}, "resample is 4, expected"),
        ({"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}, "without a crop"),
        ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 200}}, "200×200 are padded to"),
    ],
)
def test_a_preprocessing_without_ops_is_not_used_and_the_reason_is_reported(described, reason, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    with pytest.warns(UserWarning, match=reason):
        assert models.load_preprocessing(tmp_path) is None


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_an_imported_folder_seals_its_preprocessing_and_is_exported_with_it(library, files, tmp_path, request, capsys):
    theirs = request.getfixturevalue(library)
    format = {"timm": "timm", "transformers": "hf"}[library]
    if library == "timm":
        save_timm(theirs, "vit_base_patch14_reg4_dinov2", tmp_path / "theirs")
    else:
        transformers_model(theirs, "vit").save_pretrained(tmp_path / "theirs")
        processor = theirs.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size=32)
        processor.save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    record = json.loads((tmp_path / "ours" / "provenance.json").read_text())
    assert "preprocessing.json" in record["files"]
    assert "model.json" in record["files"]
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--format", format]) == 0
    assert "differ by at most 0.0e+00: the weights are exact" in capsys.readouterr().out
    ours = models.load(tmp_path / "ours")
    recorded = models.load_preprocessing(tmp_path / "ours")
    image = Image.open(files["china"]).convert("RGB")
    for folder in ("theirs", "out"):
        module, pixels_of = opened(theirs, format, tmp_path / folder)
        pixels = preprocess(decode(files["china"].read_bytes()), recorded.ops)
        found = normalise(
            torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None], ours.config, torch.float32, torch.device("cpu")
        )
        expected = torch.from_numpy(np.asarray(pixels_of(image)))[None]
        assert abs(found - expected).max() < (1e-5 if library == "timm" else 2 / 255 / 0.26)
        assert abs(logits_of(module, expected[0]) - logits_of(ours, expected[0])).max() < 1e-5


def cropped(file: Path) -> np.ndarray:
    """Preprocess an image with timm's defaults: bicubic, crop_pct 0.875, centre crop."""
    image = Image.open(file).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    image = image.crop((left, top, left + 224, top + 224))
    return (np.asarray(image, np.float32) / 127.5 - 1).transpose(2, 0, 1)


@pytest.mark.parametrize("size", [32, 224, 384])
def test_timm_resizes_to_the_side_that_the_ops_name_whatever_the_rounding(size):
    for side in range(size, 4 * size):
        told = for_timm(models.Preprocessing("", (size, size), side, "bilinear antialiased"))
        assert math.floor(size / told["crop_pct"]) == side  # as timm.data.transforms_factory has it
        assert told["crop_mode"] == "center"


def test_unequal_sides_stay_unequal(timm, transformers, files, tmp_path):
    _, folder = exported("resize((32, 48), antialias=True)", "hf", tmp_path, image_size=(32, 48))
    expected = ours(files["china"], "resize((32, 48), antialias=True)")
    _, pixels_of = opened(transformers, "hf", folder)
    assert abs(pixels_of(Image.open(files["china"])) - expected).max() <= 2 * LEVEL + 1e-6
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "timm"), "--format", "timm"]) == 0
    _, pixels_of = opened(timm, "timm", tmp_path / "timm")
    assert abs(pixels_of(Image.open(files["china"])) - expected).max() <= 2 * LEVEL + 1e-6


@pytest.mark.parametrize(
    ("ops", "image_size", "format", "message"),
    [
        ("central_crop(16)", 16, "timm", "'central_crop(16)' does not"),
        ("central_crop(16)", 16, "hf", "'central_crop(16)' does not"),
        ("resize(24)|resize(16)", 16, "hf", "but 'resize(24)|resize(16)' does not"),
        ("resize(24)|central_crop(20)|central_crop(16)", 16, "timm", "does not\n  save as safetensors"),
        ("resize_small(32)|central_crop((16, 24))", (16, 24), "timm", "the same crop_pct for both sides"),
        ("resize((24, 20))|central_crop(16)", 16, "timm", "the same crop_pct for both sides"),
    ],
)
def test_ops_that_a_library_lacks_are_refused_and_nothing_is_written(
    ops, image_size, format, message, tmp_path, capsys
):
    model = random_model(image_size=image_size)
    models.save(model, tmp_path / "ours", preprocessing=preprocessing_of(ops, model.config))
    arguments = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--format", format]
    assert main(arguments) == 64
    said = capsys.readouterr().err
    assert message in said
    assert "--preprocess" in said
    assert not (tmp_path / "out").exists()
    # The workaround that the error names.
    height, width = model.config.image_size
    assert main([*arguments, "--preprocess", f"resize(({height}, {width}))"]) == 0
    assert main([*arguments[:2], str(tmp_path / "x"), "--format", format, "--preprocess", "resize(8)"]) == 64
    assert (
        f"produces images of 8×8; nothing was written\n  expected the model's image size, {height}×{width}"
        in capsys.readouterr().err
    )


def test_folder_of_ours_keeps_the_preprocessing_and_an_npz_cannot_store_it(tmp_path, capsys):
    exported(CROPPED, "safetensors", tmp_path)
    name = "preprocessing.json"
    assert (tmp_path / "safetensors" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    assert main(["import", str(tmp_path / "safetensors"), str(tmp_path / "again")]) == 0
    assert f"pixels   {CROPPED}" in capsys.readouterr().out
    for folder in ("safetensors", "again"):
        assert name in json.loads((tmp_path / folder / "provenance.json").read_text())["files"]
    assert main(["export", str(tmp_path / "again"), str(tmp_path / "out.npz"), "--format", "npz"]) == 0
    assert f"note     an .npz file cannot store the preprocessing; tell its users: {CROPPED}" in capsys.readouterr().out
    file = tmp_path / "again" / name
    file.write_text(file.read_text().replace("256", "248"))
    assert main(["export", str(tmp_path / "again"), str(tmp_path / "out"), "--format", "timm"]) == 65
    assert "preprocessing.json has changed: its sha256 is" in capsys.readouterr().err
    # Files of earlier weights in the folder are not used for these weights.
    models.save(random_model(), tmp_path / "ours")
    assert models.load_preprocessing(tmp_path / "ours") is None
