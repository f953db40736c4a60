"""`health.audit` loads the live audit's hook."""

from types import SimpleNamespace
from typing import Any

from jobs.extras.live_audit import HOOK, LiveAuditExtra
from pipeline.extras.live_audit import LiveAudit
from pipeline.extras.replays.spikes import HealthConfig, SpikeConfig
from pipeline.hooks import load_classes

CONTEXT: Any = None  # not used


def test_hook_is_loaded_only_if_the_recipe_requests_an_audit():
    extra = LiveAuditExtra()
    audited = SpikeConfig(steps=1, exact_parts=4, health=HealthConfig(audit=0.01))
    assert list(extra.hooks(audited, CONTEXT)) == [HOOK]
    assert load_classes([HOOK]) == [LiveAudit]
    assert extra.hooks(SpikeConfig(steps=1), CONTEXT) == {}
    without_section: Any = SimpleNamespace()
    assert extra.hooks(without_section, CONTEXT) == {}
