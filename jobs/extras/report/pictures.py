"""Render the images in the HTML report, such as evaluated samples and batches with spikes, as small base64 JPEGs.

A report has at most `MAX_IMAGES` images, which keeps it below two megabytes for any number of stages. If an image
cannot be read, the report shows the reason instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from data.errors import PatchlineError
from data.extras.pages.page import jpeg
from data.images.decode import BadImage, decode
from data.index.index import Index
from data.reader import ShardReader
from data.remote.config import CacheConfig
from jobs.extras.history import RunHistory, StageHistory
from jobs.terminal import COMMAND, as_typed
from pipeline import artifacts

SAMPLES = "Samples with predictions"
MAX_IMAGES = 240  # maximum number of images per report; a thumbnail has about 4 kB
OF_SPIKE = 16  # number of images shown from a spike's global batch
SPIKES = 3  # number of newest spikes of a stage shown with images
FIGURE = 800  # pixels of the longer side
FIGURES = {
    "attention.png": "attention of the class token",
    "inside.png": "patch filters, position embeddings, and the attention distance of each head",
}
REPLAYS = 20  # maximum number of replays shown
ANALYSES = 3  # maximum number of `analyze` folders shown


class Picture(NamedTuple):
    """An image with a caption."""

    image: Markup  # base64 JPEG
    caption: str
    name: str = ""  # name of the sample
    is_wrong: bool = False


class Gallery(NamedTuple):
    """Images under a heading. The remark describes the images or explains why some are missing."""

    title: str
    pictures: list[Picture]
    remark: str = ""


class Album:
    """Renders the images of one report, up to the limit `MAX_IMAGES`."""

    def __init__(self, *, with_replay: bool = True) -> None:
        self.room = MAX_IMAGES  # number of images that can still be added
        self.with_replay = with_replay  # whether to rebuild batches, which imports torch and takes a few seconds

    def predictions(self, stage: StageHistory, examples: Mapping[str, Any], index: Index) -> Gallery:
        """Return samples of the newest evaluation with their predictions, the most confident errors first."""
        set_name = "/".join(Path(examples["set"]).parts[-2:])
        remark = f"step {examples['step']} on {set_name}: most confident errors first, then correct predictions"
        pictures: list[Picture] = []
        if index.remote and not self.with_replay:
            how = as_typed(f"{COMMAND} report {stage.address.rpartition('/')[0]}")
            return Gallery(SAMPLES, pictures, f"the images are in an object store; to show them, run {how}")
        try:
            settings = {**stage.record["config"]["data"]["cache"], "attempts": 2}
            reader = ShardReader(index, cache=CacheConfig(**settings), by_range=True)
            for example in islice(examples["samples"], self.room):
                key, encoded, _ = reader.read(example["shard"], example["sample"])
                names = [index.class_name(label) for label in example["labels"]]
                is_wrong = example["predicted"] not in example["labels"]
                prediction = f"{index.class_name(example['predicted'])} {example['confidence']:.0%}"
                caption = f"✓ {prediction}"
                if is_wrong:
                    caption = f"✗ {prediction}; label: {', '.join(names)}"
                pictures.append(Picture(jpeg(decode(encoded)), caption, key, is_wrong))
        except (PatchlineError, BadImage, OSError, ValueError, LookupError, TypeError) as error:
            remark = f"the other samples cannot be shown: {str(error) or repr(error)}"
        self.room -= len(pictures)
        return Gallery(SAMPLES, pictures, remark)

    def spikes(self, stage: StageHistory) -> list[Gallery]:
        """Return a stage's newest gradient spikes, each with images from its batch as seen by the model."""
        galleries = []
        for spike in stage.of_kind("spike")[-SPIKES:]:
            title = f"Spike at step {spike['step']}: gradient norm {spike['grad_norm']:.3g}"
            if spike["limit"] < 1e300:  # there is no limit until enough gradient norms are known
                title += f", normal up to {spike['limit']:.3g}"
            command = as_typed(f"{COMMAND} replay {stage.address} step={spike['step']}")
            if not self.with_replay or self.room < OF_SPIKE:
                galleries.append(Gallery(title, [], f"to see the batch of this step, run {command}"))
                continue
            pictures = []
            remark = (
                f"images of this step's batch as seen by the model; for the whole batch, run {command} --to batch.npz"
            )
            try:
                from pipeline.extras.replays.batch import TrainedStage  # imports torch

                batch = TrainedStage(stage.folder).batch(spike["step"], most=OF_SPIKE)
                for image, labels, (_epoch, shard, sample) in zip(batch.images, batch.labels, batch.ids, strict=True):
                    names = map(batch.source.class_name, labels[labels >= 0].tolist())
                    place = f"{batch.source.shards[int(shard)].name}, {sample}"
                    pictures.append(Picture(jpeg(image), ", ".join(names), place))
                self.room -= len(pictures)
            except Exception as error:  # for example a deleted data set, an unreachable store, a changed config
                remark = f"the batch of this step cannot be rebuilt: {str(error) or repr(error)}"
            galleries.append(Gallery(title, pictures, remark))
        return galleries

    def replays(self, run: RunHistory) -> list[Gallery]:
        """Return the results of replays in folders next to the run, and of spike searches during training."""
        folder = run.stages[0].folder.parent.resolve()
        paths = list(folder.glob(f"*/{artifacts.SEARCHES}/step-*.json"))
        for pattern in ("*/audit.json", "*/bisect.json", "*/step-*/bisect.json"):
            paths += folder.parent.glob(pattern)
        galleries = []
        for path in sorted(paths):
            pictures = []
            title = str(path.relative_to(folder.parent))
            try:
                record = artifacts.read_record(path)
                # Results of spike searches during training do not record the run: they are in its folder.
                if record.get("run", str(folder)) != str(folder):
                    continue
                title = f"{record.get('command', 'search during training')}, {record['date']}"
                remark = "; ".join(record["said"])
                for sample in record.get("samples", ())[: self.room]:
                    if sample.get("picture"):
                        image = decode((path.parent / Path(sample["picture"]).name).read_bytes())
                        names = ", ".join(sample["labels"])
                        pictures.append(
                            Picture(jpeg(image), names, f"{sample['shard']}/{sample['key']}", is_wrong=True)
                        )
            except (PatchlineError, BadImage, OSError, ValueError, LookupError, TypeError) as error:
                remark = f"this replay cannot be shown: {error}"
            self.room -= len(pictures)
            galleries.append(Gallery(title, pictures, remark))
        return galleries[-REPLAYS:]

    def analyses(self, run: Path) -> list[Gallery]:
        """Return the figures written by `analyze` to the run directory or to a stage's folder."""
        galleries = []
        for numbers in sorted([*run.glob("*/analysis.json"), *run.glob("*/*/analysis.json")])[:ANALYSES]:
            pictures = []
            try:
                analysis = json.loads(numbers.read_bytes())
                remark = f"{analysis['weights']}, {len(analysis['images'])} images"
                for name, caption in FIGURES.items():
                    image = jpeg(decode((numbers.parent / name).read_bytes()), FIGURE)
                    pictures.append(Picture(image, caption, name))
            except (OSError, BadImage, ValueError, LookupError, TypeError) as error:
                remark = f"this analysis cannot be shown: {error}"
            galleries.append(Gallery(str(numbers.parent.relative_to(run)), pictures, remark))
        return galleries
