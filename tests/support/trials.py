"""Trials written by hand, for tests of the plans based on them."""

import dataclasses
from pathlib import Path

from jobs.extras.planning.trial import trial_key
from pipeline.extras.plan.trial import Trial, write_trial
from tests.support.campaigns import load


def key_in(recipe: Path, name: str, *overrides: str) -> str:
    """Return the key under which trials of a stage are stored."""
    loaded = load(recipe, list(overrides))
    return trial_key(loaded, loaded.stage(name))


def write_trials(run: Path, recipe: Path) -> Trial:
    """Write a trial of both trained stages on 2 workers: 100 ms per step of 16 images, 80 ms of it compute."""
    values = {"backend": "processes", "gpus_per_worker": 0, "cpus_per_worker": 1, "hardware": "Abacus", "commit": ""}
    trial = Trial(
        stage="pretrain",
        key=key_in(recipe, "pretrain"),
        world=2,
        date="2030-01-01",
        steps=25,
        images_per_s=160.0,
        step_s=0.1,
        compute_s=0.08,
        storage_s=0.0,
        decode_s=0.02,
        transfer_s=0.0,
        memory_gib=1.5,
        save_stall_s=0.02,
        save_s=0.5,
        until_steady_s=10.0,
        **values,
    )
    write_trial(run, trial)
    write_trial(run, dataclasses.replace(trial, stage="finetune", key=key_in(recipe, "finetune")))
    return trial
