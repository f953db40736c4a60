"""The README's commands work on a tiny run; for commands that cannot run here, the subcommand must exist.

1. The lines of code blocks that begin with `python -m jobs` are the commands, in the order of the README.
2. `places` maps names in the README to replacements, for example `runs/digits` to the tiny run. The commands run with
   the names replaced, one after another, so that each finds the results of the previous ones.
3. A command that cannot run here (`NOT_HERE`) must name a subcommand whose `--help` works.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import models
from data.extras.sources.samples import digits
from jobs.__main__ import main
from tests.support.recipes import TINY

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# These need a Ray cluster; tests/test_jobs/extras/submit/test_submission.py starts it.
NOT_HERE = ("submit", "list", "logs", "stop")
ENTRY = ["python", "-m", "jobs"]

# Matches paths of the repository in a text; "/data/web" is a user's path.
PATH = re.compile(r"(?<![\w/.])(?:jobs|pipeline|models|data|tests|docs|benchmarks)/[\w./-]*\w")
# The pattern excludes docs/design/SPEC.md, in capitals, because it describes other people's repositories.
DOCUMENTS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("[a-z]*.md"))
PAGES = ["README.md", "benchmarks/README.md", *DOCUMENTS]


def code_blocks(text: str) -> list[str]:
    """Return the contents of the fenced blocks."""
    return text.split("```")[1::2]


def commands() -> list[list[str]]:
    """Return the words of every command in the README's code blocks, without comments."""
    lines = [line for block in code_blocks(README) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("python -m jobs")]


def subcommand(words: list[str]) -> str:
    """Return the word after `python -m jobs`."""
    return words[3] if words[:3] == ENTRY else ""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[str, str]:
    """Map the README's names to files of this test; stages are resolved later (see `in_place`)."""
    folder = tmp_path_factory.mktemp("readme")
    recipe = folder / "tiny.yaml"
    text = TINY.format(run=folder / "run", shards=shards)
    text = text.replace("steps: 24", "steps: 2").replace("warmup_steps: 5", "warmup_steps: 2")
    recipe.write_text(text.replace("workers: 2", "workers: 1"))

    # Two class folders of images, and an official weights file.
    for number, sample in enumerate(digits(train=False, image_size=16)):
        if number == 8:
            break
        path = folder / "images" / f"class-{number % 2}" / f"{number}.{sample.extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.read())
    config = models.config_of("mu/8", 16, 10)
    models.save_weights(models.from_config(config).state_dict(), folder / "ours", config)
    official = folder / "vit_b16.npz"
    assert main(["export", str(folder / "ours"), str(official), "--format", "npz"]) == 0

    # `jobs new photos` finds this folder in the current directory, and writes photos.yaml next to it.
    (folder / "photos").symlink_to(folder / "images")

    return {
        "runs/photos": str(folder / "runs" / "photos"),
        "jobs/recipes/digits.yaml": str(recipe),
        "runs/digits": str(folder / "run"),
        "/images/train": str(folder / "images"),
        "/images/test": str(folder / "images"),
        "shards/train": str(folder / "packed"),
        "shards/test": str(folder / "packed-test"),
        "report.html": str(folder / "report.html"),
        "vit_b16.npz": str(official),
        "weights/b16": str(folder / "imported"),
        "out": str(folder / "out"),
        "photos/": str(folder / "images" / "class-0"),
        "photos/cat": str(folder / "images" / "class-0"),
        "figures": str(folder / "figures"),
        "step=120": "step=2",
        "finetune.steps=300": "finetune.steps=3",
    }


def in_place(word: str, places: dict[str, str]) -> str:
    """Return the replacement for a word of a command: a path, or a stage of a run."""
    if word in places:
        return places[word]
    stage = re.fullmatch(r"(runs/\w+)/(\w+)", word)
    return word if stage is None else f"{places[stage[1]]}/{stage[2]}"


def run(words: list[str]) -> int:
    """Return the exit code of a README command; other modules than `jobs` run in a separate process."""
    if words[:3] == ENTRY:
        return main(words[3:])
    return subprocess.run([sys.executable, *words[1:]], cwd=ROOT, timeout=120).returncode


def test_the_commands_of_the_readme_run(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(places["runs/digits"]).parent)
    wanted = [words for words in commands() if subcommand(words) not in NOT_HERE]
    names = {subcommand(words) for words in wanted}
    assert {"plan", "run", "status", "pack", "data", "import", "export", "checkpoints", "replay", "analyze"} <= names
    for words in wanted:
        # The recipe of `jobs new` trains for ten minutes.
        if words[-1] == "photos.yaml":
            words += ["pretrain.steps=2", "pretrain.optim.schedule.warmup_steps=1"]
        assert run([in_place(word, places) for word in words if word != "--open"]) == 0, shlex.join(words)

    # The Python lines below the commands open the exports, and both libraries see the same model.
    (code,) = [block.removeprefix("python\n") for block in code_blocks(README) if block.startswith("python\n")]
    shutil.copy(next(Path("images/class-0").iterdir()), "photo.jpg")
    printed: list[torch.Tensor] = []
    exec(code, {"print": printed.append})
    of_timm, of_transformers = printed
    assert of_timm.shape == (1, 2)
    torch.testing.assert_close(of_timm, of_transformers, atol=1e-3, rtol=0)


def test_every_command_that_the_readme_names_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    in_sentences = re.findall(r"`python -m jobs ([a-z]+)", README)
    in_blocks = [subcommand(words) for words in commands()]
    named = {name for name in (*in_sentences, *in_blocks) if name}
    assert set(NOT_HERE) < named
    for name in sorted(named):
        assert main([name, "--help"]) == 0, name
        assert name in capsys.readouterr().out


def test_every_target_of_make_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    linked = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [link for link in linked if not ((ROOT / page).parent / link).exists()]
    for name in PATH.findall(text):
        if not (ROOT / name).exists():
            missing.append(name)
    assert not missing, f"{page} names {', '.join(missing)}"
