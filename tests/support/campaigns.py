"""Campaigns and kinds of stages for tests."""

import copy
from collections.abc import Callable
from pathlib import Path

import jobs.__main__
from jobs.kinds import load_kinds
from jobs.recipe import campaign
from jobs.resolved_recipe import Campaign, StageKind

KINDS = load_kinds(jobs.__main__.KINDS)
# The table of kinds without extras.
CORE = {name: place.split()[0] for name, place in jobs.__main__.KINDS.items() if ".extras." not in place.split()[0]}


def load(recipe: Path, overrides: list[str]) -> Campaign:
    """Return the validated campaign of a recipe, which may have stages of all kinds."""
    return campaign.load(recipe, overrides, KINDS)


def with_methods(kind: StageKind, **methods: Callable[..., object]) -> StageKind:
    """Return a copy of a kind of stage with functions in place of some of its methods."""
    changed = copy.copy(kind)
    for name, method in methods.items():
        assert hasattr(kind, name), f"{name} is no method of a kind of stage"
        setattr(changed, name, method)
    return changed
