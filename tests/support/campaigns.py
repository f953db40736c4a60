"""Campaigns and kinds of stages for tests."""

import copy
from collections.abc import Callable

from jobs.resolved_recipe import StageKind


def with_methods(kind: StageKind, **methods: Callable[..., object]) -> StageKind:
    """Return a copy of a kind of stage with functions in place of some of its methods."""
    changed = copy.copy(kind)
    for name, method in methods.items():
        assert hasattr(kind, name), f"{name} is no method of a kind of stage"
        setattr(changed, name, method)
    return changed
