"""DeepSpeed's undocumented names are listed in a single file, which checks at the start that they exist."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from data.errors import ConfigError
from pipeline.engine import deepspeed as insides
from pipeline.engine.deepspeed import EXPECTED, NAMES, Partitions, Shards, has_name, import_deepspeed

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]
FILE = ROOT / "pipeline" / "engine" / "deepspeed.py"
CHECKED = {name for names in NAMES.values() for name in names.split()}


def attributes(path: Path) -> set[str]:
    """Return the names that a file uses as attributes."""
    tree = ast.parse(path.read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_checked_names_are_exactly_the_used_private_names() -> None:
    text = FILE.read_text()
    used = {name for name in attributes(FILE) if is_private(name)}
    assert used - {"_foreach_mul_"} <= CHECKED
    behind_the_table = text[text.index("def check_names") :]
    for name in CHECKED:
        assert re.search(rf"\b{name}\b", behind_the_table), f"{name} is checked, and nothing uses it"


def test_no_other_file_uses_private_names_of_deepspeed() -> None:
    private = {name for name in CHECKED if is_private(name)}
    for package in ("models", "data", "pipeline", "jobs"):
        for path in (ROOT / package).rglob("*.py"):
            if path == FILE:
                continue
            assert not attributes(path) & private, f"{path}: {attributes(path) & private}"
            imported = re.findall(r"^ *(?:from|import) (deepspeed\.\S+)", path.read_text(), re.MULTILINE)
            assert not imported, f"{path} imports {imported}; let {FILE.name} do it"


def test_names_exist_in_the_pinned_version() -> None:
    assert f'"deepspeed=={EXPECTED}"' in (ROOT / "pyproject.toml").read_text()
    assert f"deepspeed=={EXPECTED}\n" in (ROOT / "constraints.txt").read_text()
    assert import_deepspeed().__version__ == EXPECTED


def test_missing_name_in_a_module_ends_the_start_with_versions_and_a_remedy(monkeypatch) -> None:
    monkeypatch.setattr(import_deepspeed(), "__version__", "0.20.1")
    engine = import_deepspeed().DeepSpeedEngine
    monkeypatch.delattr(engine, "_do_optimizer_sanity_check")
    with pytest.raises(ConfigError) as raised:
        import_deepspeed()
    assert str(raised.value).splitlines() == [
        "DeepSpeed 0.20.1: deepspeed.runtime.engine.DeepSpeedEngine has no _do_optimizer_sanity_check",
        "  expected DeepSpeed 0.19.8, whose private names Patchline uses (pipeline/engine/deepspeed.py)",
        "  run: pip install deepspeed==0.19.8",
    ]


def test_missing_module_is_reported(monkeypatch) -> None:
    monkeypatch.setitem(insides.NAMES, "deepspeed.runtime.nowhere", "anything")
    with pytest.raises(ConfigError, match=r"deepspeed\.runtime\.nowhere has no anything"):
        import_deepspeed()


@pytest.mark.parametrize(
    ("stage", "of"), [(Partitions, "the optimizer of ZeRO 1 and 2"), (Shards, "the optimizer of ZeRO 3")]
)
def test_missing_name_in_an_optimizer_ends_the_start(stage, of) -> None:
    names = dict.fromkeys(NAMES[of].split())
    del names["_optimizer_step"], names["overflow"]
    engine = SimpleNamespace(optimizer=SimpleNamespace(**names), module=SimpleNamespace(parameters=list))
    with pytest.raises(ConfigError, match=rf"{of} has no _optimizer_step, overflow\n  expected DeepSpeed {EXPECTED}"):
        stage(engine)


PLANTED = """
import deepspeed.ops.op_builder.builder as builder
from deepspeed.ops.op_builder.all_ops import ALL_OPS

probed = []


class Planted:
    def is_compatible(self, verbose=False):
        probed.append("is_compatible")
        return False


for name in ALL_OPS:
    ALL_OPS[name] = Planted()
builder.probe_is_compatible = lambda operator: probed.append("probe") or False

from pipeline.engine.deepspeed import import_deepspeed

deepspeed = import_deepspeed()
import_deepspeed()
print(len(ALL_OPS), probed, deepspeed.ops.__compatible_ops__)
del deepspeed.ops.__compatible_ops__
deepspeed.ops.__compatible_ops__
print(len(probed))
"""


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_starting_a_worker_probes_no_deepspeed_operator(accelerator) -> None:
    """Plant operators that would record a probe; the last line shows that they do."""
    environment = {**os.environ, "DS_ACCELERATOR": accelerator}
    command = [sys.executable, "-c", PLANTED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    at_start, by_hand = done.stdout.splitlines()[-2:]
    operators, _, rest = at_start.partition(" ")
    assert rest == "[] {'deepspeed_shm_comm': False}"
    assert int(by_hand) == int(operators) > 0


def test_check_does_not_compute_lazily_created_names() -> None:
    module = ModuleType("lazy")
    exec("def __getattr__(name):\n    if name == 'made':\n        raise RuntimeError('made')", vars(module))
    assert has_name(module, "made")
    assert not has_name(module, "other")
