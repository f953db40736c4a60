"""Commands in the spelling of earlier versions are refused with the command to type today."""

import json
import shlex

import pytest

from jobs.__main__ import main
from jobs.extras.checkpoints.old_spellings import command_today

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("checkpoints export runs/a --to w", "export runs/a w"),
        ("checkpoints export runs/a/pretrain/ --step=50 --to=w --json", "export runs/a/pretrain/step-50 w --json"),
        ("checkpoints export --to 'my weights' 'runs/my run'", "export 'runs/my run' 'my weights'"),
        ("checkpoints diff runs/a --step 100 --with-step 50", "diff runs/a/step-50 runs/a/step-100"),
        ("checkpoints diff runs/b --with runs/a", "diff runs/a runs/b"),
        ("checkpoints diff runs/b runs/a", "diff runs/a runs/b"),
        ("checkpoints verify runs/a --step 50", "checkpoints verify runs/a/step-50"),
        ("checkpoints inspect --step 50 runs/a --debug", "checkpoints inspect runs/a/step-50 --debug"),
        ("checkpoints export", "export --help"),
        ("checkpoints verify runs/a --keep 2", ""),
        ("checkpoints list", ""),
        ("export runs/a --to w", ""),
    ],
)
def test_the_command_of_today(old: str, today: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_today(shlex.split(old)) == (f"python -m jobs {today}" if today else "")
    if today:
        assert main(shlex.split(old)) == 64
        out, err = capsys.readouterr()
        assert f"instead, run python -m jobs {today}" in err
        if "--json" in old:
            assert json.loads(out)["next"][0] | {"text": ""} == {
                "do": "instead",
                "command": f"python -m jobs {today}",
                "text": "",
            }
