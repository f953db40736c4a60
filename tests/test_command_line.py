"""The command line as a whole: imports, options, recipes by name, and hints after errors."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

from jobs.__main__ import main
from jobs.cluster.fork_server import IMPORTS
from jobs.run.session import stages_of
from tests.support import campaigns

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]


def test_a_python_without_our_packages_gets_install_instructions():
    command = [sys.executable, "-S", "-m", "jobs", "new", "photos"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 69
    assert "run make env && source .venv/bin/activate" in done.stderr


def test_help_does_not_import_slow_packages():
    """`--help` must answer in 0.2 s: torch takes two seconds to import, pydantic and rich 0.1 s each."""
    script = (
        "import sys; from jobs.__main__ import main; main(['--help']); "
        "print(sorted({'torch', 'ray', 'omegaconf', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


LEAN = """
import os
import sys
from jobs.commands import status
print("torch" in sys.modules)
from jobs.cluster.fork_server import import_for_workers
import_for_workers()
print("torch._dynamo" in sys.modules)
import deepspeed.runtime.zero.muon.muon_optimizer  # whose functions torch.compile would wrap
print("torch._inductor.codecache" in sys.modules)
"""


def test_status_imports_no_torch_and_a_fork_server_the_compiler_for_all_workers():
    """Each import would cost every command or every worker a second or more (benchmarks/README.md)."""
    done = subprocess.run([sys.executable, "-c", LEAN], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line in ("True", "False")]
    assert lines == ["False", "True", "False"]


MISTAKES = """
import shlex
import sys
from jobs.__main__ import main

for line in sys.stdin:
    code = main(shlex.split(line))
    heavy = {"torch", "deepspeed", "ray"} & set(sys.modules)
    assert not heavy, (line, heavy)
    print("exit code", code, flush=True)
"""


def test_a_mistake_is_reported_before_torch_deepspeed_or_ray_are_imported(tmp_path):
    """Importing torch takes more than a second of CPU time, the rest of a command half a second."""
    wrong = {
        "--help": 0,
        "rnu digits": 64,
        "run": 64,
        "run nosuch": 78,
        "run digits pretrain.optim.lrr=1": 78,
        "run digits pretrian.seed=1": 78,
        "run digits pretrain.optim.lr=abc": 78,
        "run digits pretrain.steps=-1": 78,
        "run digits pretrain.model.name=Q/16": 78,
        "run digits pretrain.model.heds=3": 78,
        "run digits finetune.init=@pretrian": 78,
        "run digits pretrain.batch_size=100 pretrain.micro_batch=64": 78,
        "run digits cluster.workers=0": 78,
        "run digits shards.sets.train.source=foldr": 78,
        f"run digits run={tmp_path}/run pretrain.data.train=/nowhere": 65,
        "plan digits pretrain.stepz=3": 78,
        "trial digits pretrain.stepz=3": 78,
        "preflight digits pretrain.stepz=3": 78,
        "submit digits pretrain.stepz=3": 78,
        "status runs/none": 64,
        "pack foldr x y": 64,
        "subset /nowhere --output x --shots 1 --seed 0": 65,
    }
    asked = subprocess.run(
        [sys.executable, "-c", MISTAKES], cwd=ROOT, input="\n".join(wrong), capture_output=True, text=True
    )
    answers = [line for line in asked.stdout.splitlines() if line.startswith("exit code")]
    assert answers == [f"exit code {code}" for code in wrong.values()], asked.stderr


FORK_SERVER_SEEN = """
import os
import sys
from jobs.cluster import fork_server

def look(server, words, environment, handles):
    heavy = {"torch", "deepspeed", "ray"} & set(sys.modules)
    print("fork server", sorted(heavy), *words[6:], flush=True)
    os._exit(0)

fork_server.ForkServer.launch = look
from jobs.__main__ import main
main()
"""


EMBEDDED_SEEN = """
import os
import subprocess
import sys
import tempfile

def look(process, command, **options):
    heavy = {"torch", "deepspeed", "ray"} & set(sys.modules)
    print("guard", sorted(heavy), command[3], command[-1], flush=True)
    os._exit(0)

subprocess.Popen.__init__ = look
tempfile.mkdtemp = lambda **options: os.devnull
from jobs.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("address", ["", "local"])
def test_an_embedded_cluster_is_started_before_the_driver_imports_torch_and_ray(recipe, address):
    script = [sys.executable, "-c", EMBEDDED_SEEN, "run", str(recipe), "cluster.backend=ray"]
    environment = os.environ | {"RAY_ADDRESS": address}
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "guard [] jobs.cluster.embedded 2\n", done.stderr


@pytest.mark.parametrize("only", [[], ["--only", "pretrain"]])
def test_the_fork_server_is_started_before_the_driver_imports_torch(recipe, only):
    """Both import torch for a second; started early, they do so at the same time (benchmarks/README.md)."""
    script = [sys.executable, "-c", FORK_SERVER_SEEN, "run", str(recipe), "cluster.backend=processes", *only]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"fork server [] {IMPORTS}\n", done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["{recipe}", "a=1", "b=2", "--fresh"],
        ["--fresh", "{recipe}", "a=1", "b=2"],
        ["{recipe}", "--fresh", "a=1", "b=2"],
        ["{recipe}", "a=1", "--fresh", "b=2"],
    ],
)
def test_options_may_be_anywhere_among_the_overrides(recipe, monkeypatch, words):
    calls = []
    monkeypatch.setattr("jobs.recipe.campaign.resolve", lambda document, kinds: document)
    monkeypatch.setattr("jobs.run.session.run_campaign", lambda loaded, fresh, **_: calls.append((loaded, fresh)))
    assert main(["run", *(word.format(recipe=recipe) for word in words)]) == 0
    ((document, fresh),) = calls
    assert fresh
    assert document.source == str(recipe)
    assert (document.values["a"], document.values["b"]) == (1, 2)


@pytest.mark.parametrize(
    "words",
    [
        ["{recipe}", "pretrain.seed=5", "pretrain.keep=7", "--resolved"],
        ["--resolved", "{recipe}", "pretrain.seed=5", "pretrain.keep=7"],
        ["{recipe}", "pretrain.seed=5", "--resolved", "pretrain.keep=7"],
    ],
)
def test_resolved_may_be_anywhere_among_the_overrides(recipe, capsys, words):
    assert main(["plan", *(word.format(recipe=recipe) for word in words)]) == 0
    out = capsys.readouterr().out
    pretrain = yaml.safe_load(out)["pretrain"]
    assert (pretrain["seed"], pretrain["keep"]) == (5, 7)
    assert out.endswith("\n"), "a file that it is written to has no empty last line"
    assert not out.endswith("\n\n"), "a file that it is written to has no empty last line"


def test_a_built_in_recipe_is_found_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "digits", f"run={tmp_path}"]) == 0
    assert "shards (pack" in capsys.readouterr().out
    assert main(["plan", "digit"]) == 78
    assert "no recipe at digit\n  did you mean digits?" in capsys.readouterr().err
    assert main(["plan", "quite-another"]) == 78
    assert "built-in recipes: cifar10, cifar10_bit, digits, vit_b16_i1k" in capsys.readouterr().err


def test_a_folder_is_not_a_recipe_and_does_not_hide_a_built_in_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "digits").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "digits"]) == 0
    assert main(["plan", "other"]) == 78
    assert (
        "error: other is a folder, not a recipe\n  to write a recipe for the images in it, run python -m jobs new"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_as_run_directory_is_refused_before_the_start(tmp_path, capsys, command, below):
    (tmp_path / "file").touch()
    assert main([command, "digits", f"run={tmp_path}/file{below}"]) == 78
    assert f"error: {tmp_path}/file is a file\n  expected a run directory, or a path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "pretrain.init=@shards/train",
            "pretrain.init is @shards/train, which has no weights\n  expected @stage with a stage of kind",
        ),
        ("fewshot.init=@pretrain/x", "fewshot.init is @pretrain/x, which has no weights"),
        ("pretrain.data.train=@shards", "but shards has no data set ''; known: pretrain, pretrain-test, test, train"),
        ("pretrain.data.train=@shards/trian", "did you mean 'train'?\n  expected one of @shards/pretrain, "),
        ("finetune.data.train=@resize/train", "writes no data set\n  expected @STAGE/SET with a pack stage"),
        ("pretrain=3", "pretrain is 3, expected a stage's section\n"),
    ],
)
def test_a_reference_to_a_wrong_part_lists_the_possible_parts(tmp_path, capsys, override, message):
    assert main(["plan", "digits", f"run={tmp_path}/run", override]) == 78
    assert message in capsys.readouterr().err


def test_only_selects_a_stage_by_name_or_kind(recipe, monkeypatch, capsys):
    shards = campaigns.load(recipe, []).stage("pretrain").config.data.train
    second = f"again={{kind: finetune, init: '@resize', data: {{train: {shards}}}, model: {{classes: 10}}, steps: 1,"
    second += " optim: {schedule: {warmup_steps: 0}}}"
    stages: list[str] = []

    def run_campaign(loaded, watchers, fresh, only):
        stages.extend(stage.name for stage in stages_of(loaded, only))

    monkeypatch.setattr("jobs.run.session.run_campaign", run_campaign)
    assert main(["run", str(recipe), "--only", "finetune"]) == 0
    assert main(["run", str(recipe), "--only", "resize"]) == 0
    assert main(["run", str(recipe), second, "--only", "again"]) == 0
    assert main(["run", str(recipe), "finetune.sweep={seeds: [0, 1]}", "--only", "finetune"]) == 0
    assert stages == ["finetune", "resize", "again", "finetune.seed-0", "finetune.seed-1", "finetune"]


def test_only_selects_a_renamed_stage_by_its_unique_kind(recipe):
    text = recipe.read_text().replace("\nfinetune:", "\ntune:\n  kind: finetune").replace("@finetune", "@tune")
    recipe.write_text(text)
    (stage,) = stages_of(campaigns.load(recipe, []), "finetune")
    assert stage.name == "tune"


def test_only_refuses_a_kind_with_several_stages(recipe, capsys):
    shards = campaigns.load(recipe, []).stage("pretrain").config.data.train
    second = f"again={{kind: finetune, init: '@resize', data: {{train: {shards}}}, model: {{classes: 10}}, steps: 1,"
    second += " optim: {schedule: {warmup_steps: 0}}}"
    # --only would select a section with the name of the kind, but there is none.
    text = recipe.read_text().replace("\nfinetune:", "\ntune:\n  kind: finetune").replace("@finetune", "@tune")
    recipe.write_text(text)
    assert main(["run", str(recipe), second, "--only", "finetune"]) == 78
    assert "2 stages of kind finetune: tune, again\n  use one of these names after --only" in capsys.readouterr().err
    assert main(["run", str(recipe), second, "--only", "agian"]) == 78
    assert "no stage 'agian'; did you mean 'again'?" in capsys.readouterr().err


def test_the_installed_command_and_its_packages_are_declared():
    """`pip install -e .` finds every package by itself only if each is declared; recipes and C++ go along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"patchline": "jobs.__main__:run_process"}
    setuptools = project["tool"]["setuptools"]
    folders = {path.parent for name in ("models", "data", "pipeline", "jobs") for path in (ROOT / name).rglob("*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    patterns = setuptools["packages"]["find"]["include"]
    assert set(find_packages(str(ROOT), include=patterns)) == packages
    for package, names in setuptools["package-data"].items():
        for name in names:
            assert list((ROOT / package.replace(".", "/")).glob(name)), f"{package} has no {name}"
