"""The table of the core's kinds of stages, as text: the command line reads it without importing any of them."""

from collections.abc import Sequence

CORE = {
    "pack": "jobs.stages.pack:Pack",
    "pretrain": "jobs.stages.training:Pretrain",
    "resize": "jobs.stages.resize:Resize",
    "finetune": "jobs.stages.training:Finetune",
    "fewshot": "jobs.stages.fewshot:FewShot",
    "evaluate": "jobs.stages.evaluate:Evaluate",
}


def with_extras(place: str, extras: Sequence[str]) -> str:
    """Return the text of a kind to which extras are attached, each "module:Class"."""
    return " ".join([place, *extras])
