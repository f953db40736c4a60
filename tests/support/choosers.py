"""A kind of stage that determines a value, and one that uses it: `user: {rate: "@chooser/rate"}`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jobs.recipe import campaign
from jobs.resolved_recipe import Campaign, StageKind
from pipeline import artifacts
from pipeline.config import Tags, tags
from tests.support.campaigns import KINDS


@dataclass(frozen=True)
class ChooserConfig:
    rates: tuple[float, ...] = (0.5, 0.25)

    RESUME: ClassVar[Tags] = tags(forbid="rates")


class Chooser(StageKind):
    """A kind of stage that determines one value for other stages and has no inputs."""

    name = "chooser"
    config = ChooserConfig
    needs_workers = False

    def placeholders(self, cfg: ChooserConfig) -> Mapping[str, object]:
        return {"rate": cfg.rates[0]}

    def values(self, folder: Path) -> Mapping[str, object]:
        chosen: dict[str, object] = artifacts.read_record(folder / "chosen.json")["chosen"]
        return chosen

    def value_in_words(self, cfg: ChooserConfig, name: str) -> str:
        return f"one of {cfg.rates}"


@dataclass(frozen=True)
class UserConfig:
    rate: float = 1.0
    title: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    RESUME: ClassVar[Tags] = tags(forbid="rate more", free="title")


class User(StageKind):
    name = "user"
    config = UserConfig
    needs_workers = False


ALL = {**KINDS, "chooser": Chooser(), "user": User()}
RECIPE = "user: {rate: '@chooser/rate', title: '@home'}\nchooser: {}\n"


def load_chooser(folder: Path, *overrides: str) -> Campaign:
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        recipe.write_text(f"run: {folder}/run\n{RECIPE}")
    return campaign.load(recipe, list(overrides), ALL)


def finish_chooser(loaded: Campaign, **chosen: float) -> None:
    chooser = loaded.stage("chooser")
    folder = loaded.directory(chooser)
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "chosen.json", {"chosen": chosen})
    artifacts.write_record(folder / "done.json", {"key": chooser.key})
