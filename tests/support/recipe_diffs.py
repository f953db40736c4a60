"""Variants of shipped recipes, and the output of `jobs diff`, for its tests."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from jobs.__main__ import main
from jobs.commands import campaigns
from jobs.commands.campaigns import RECIPES
from jobs.resolved_recipe import Campaign, Kinds
from pipeline.recipe import read_recipe
from tests.support.campaigns import KINDS

LOAD = campaigns.load_campaign


@cache
def shipped(name: str) -> Campaign:
    return LOAD(name, [], KINDS)


def read_shipped_recipes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `jobs diff` parse each shipped recipe only once, because parsing is slow."""

    def load_campaign(path: str, words: list[str], kinds: Kinds) -> Campaign:
        return shipped(path) if path in campaigns.shipped() and not words else LOAD(path, words, kinds)

    monkeypatch.setattr("jobs.extras.diff.diff.load_campaign", load_campaign)


def write_variant(folder: Path, recipe: str, *overrides: str, name: str = "mine.yaml") -> str:
    """Write a shipped recipe with overrides applied; return its path."""
    file = folder / name
    file.write_text(yaml.safe_dump(dict(read_recipe(RECIPES / f"{recipe}.yaml", overrides).values)))
    return str(file)


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the lines that `jobs diff` prints."""
    assert main(["diff", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def subjects(lines: list[str]) -> list[str]:
    """Return the subjects of the numbered differences."""
    return [line[4:].partition(":")[0] for line in lines if re.match(r" ?\d+\. ", line)]
