"""The commands to type today instead of the spellings of earlier versions.

checkpoints export runs/photos/pretrain --step 50 --to weights
    →  export runs/photos/pretrain/step-50 weights
checkpoints diff runs/photos/pretrain --step 100 --with-step 50
    →  diff runs/photos/pretrain/step-50 runs/photos/pretrain/step-100
checkpoints verify runs/photos --step 50
    →  checkpoints verify runs/photos/step-50
"""

import shlex
from collections.abc import Sequence

from jobs.terminal import program

OPTIONS = ("--to", "--step", "--with", "--with-step")
FLAGS = ("--json", "--debug")


def command_today(words: Sequence[str]) -> str:
    """Return the command that does today what `words` did in an earlier version; "" for any other command."""
    if len(words) < 2 or words[0] != "checkpoints":
        return ""
    given: dict[str, str] = {}  # option → its value
    paths: list[str] = []
    rest = iter(words[2:])
    for word in rest:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            given[option] = value if equals else next(rest, "")
        elif word not in FLAGS:
            paths.append(word)
    if not paths:
        return f"{program()} {words[1]} --help" if words[1] in ("export", "diff") else ""
    first = address(paths[0], given.get("--step"))
    today: list[str] = []
    if words[1] == "export":
        today = ["export", first, given.get("--to", "TARGET")]
    elif words[1] == "diff":
        # The changes were printed from the second checkpoint to the first.
        other = paths[1] if len(paths) > 1 else given.get("--with", paths[0])
        today = ["diff", address(other, given.get("--with-step")), first]
    elif words[1] in ("verify", "inspect") and "--step" in given:
        today = ["checkpoints", words[1], first]
    if not today:
        return ""
    return f"{program()} {shlex.join([*today, *(word for word in words if word in FLAGS)])}"


def address(path: str, step: str | None) -> str:
    """Return the path of a run or stage, followed by the checkpoint of a step if one is given."""
    return path if step is None else f"{path.rstrip('/')}/step-{step}"
