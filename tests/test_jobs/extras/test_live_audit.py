"""`health.audit` loads the live audit's hook; a run with a flipped bit rolls back, and ends as if none had flipped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jobs.extras.live_audit import HOOK, LiveAuditExtra
from jobs.recipe import campaign
from jobs.run.session import run_campaign
from pipeline.extras.live_audit import LiveAudit
from pipeline.extras.replays.spikes import HealthConfig, SpikeConfig
from pipeline.hooks import load_classes
from tests.support import audited_runs, campaigns

CONTEXT: Any = None  # not used


def test_hook_is_loaded_only_if_the_recipe_requests_an_audit():
    extra = LiveAuditExtra()
    audited = SpikeConfig(steps=1, exact_parts=4, health=HealthConfig(audit=0.01))
    assert list(extra.hooks(audited, CONTEXT)) == [HOOK]
    assert load_classes([HOOK]) == [LiveAudit]
    assert extra.hooks(SpikeConfig(steps=1), CONTEXT) == {}
    without_section: Any = SimpleNamespace()
    assert extra.hooks(without_section, CONTEXT) == {}


def test_run_with_a_flipped_bit_resumes_and_has_the_losses_of_an_undisturbed_run(recipe: Path, capsys):
    """Two workers in plain processes, in exact mode; worker 1's gradient in step 6 is wrong once."""
    stages = {}
    for name, kinds in (("flipped", audited_runs.kinds()), ("clean", None)):
        changes = audited_runs.changes(recipe.parent / name, audit=1.0 if kinds else 0.0)
        loaded = campaign.load(recipe, changes, kinds or campaigns.KINDS)
        run_campaign(loaded, only="pretrain")
        stages[name] = loaded.directory(loaded.stage("pretrain"))
    said = capsys.readouterr().out
    assert "CorruptWorker: live audit of step 6: worker 1 computed wrong results: the gradient of " in said
    assert "computed wrong results but cannot be excluded, because the other nodes do not have enough room" in said
    assert "restarting from step 4" in said
    assert audited_runs.losses_of(stages["flipped"]) == audited_runs.losses_of(stages["clean"])
    flipped, clean = ((stages[name] / "weights.safetensors").read_bytes() for name in ("flipped", "clean"))
    assert flipped == clean
