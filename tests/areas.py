"""Which area every test file belongs to, and which files are quick: `python -m tests.areas` prints the quick ones.

`make test` sums its time by area (tests/conftest.py); `make check` runs the quick files; tests/test_areas.py holds that
no file is missing here.
"""

AREAS: dict[str, tuple[str, ...]] = {
    "models": (
        "test_models_analysis.py",
        "test_models_cost.py",
        "test_models_initial.py",
        "test_models_masked.py",
        "test_models_transfer.py",
        "test_models_vit.py",
        "test_models_weights.py",
    ),
    "data": (
        "test_archives.py",
        "test_cache.py",
        "test_decode.py",
        "test_doctor.py",
        "test_files.py",
        "test_gpu.py",
        "test_ingest.py",
        "test_leaks.py",
        "test_loader.py",
        "test_order.py",
        "test_packing.py",
        "test_preprocess.py",
        "test_randaug.py",
        "test_rot.py",
        "test_store.py",
        "test_subset.py",
        "test_tar.py",
        "test_vtab.py",
        "test_vtab_archives.py",
    ),
    "pipeline": (
        "test_accounting.py",
        "test_checkpoint.py",
        "test_checkpoint_crash.py",
        "test_config.py",
        "test_deepspeed_file.py",
        "test_engine.py",
        "test_evaluate.py",
        "test_exact.py",
        "test_finetune.py",
        "test_full_size.py",
        "test_handover.py",
        "test_memory.py",
        "test_metrics_index.py",
        "test_optimizer.py",
        "test_preflight.py",
        "test_probe.py",
        "test_protocols.py",
        "test_reference_loop.py",
        "test_telemetry.py",
        "test_train.py",
        "test_twin.py",
        "test_versions.py",
        "test_watchdog.py",
    ),
    "jobs": (
        "test_analyze.py",
        "test_areas.py",
        "test_campaign.py",
        "test_checkpoint_command.py",
        "test_class_names.py",
        "test_command_line.py",
        "test_configuration_page.py",
        "test_data_commands.py",
        "test_evaluate_stage.py",
        "test_jobs_cluster.py",
        "test_jobs_submission.py",
        "test_layout.py",
        "test_monitoring.py",
        "test_node_files.py",
        "test_preflight_command.py",
        "test_queue.py",
        "test_ray_nodes.py",
        "test_recipes.py",
        "test_sweeps.py",
        "test_trackers.py",
        "test_ways_in.py",
        "test_weights_commands.py",
        "test_worlds.py",
    ),
    "whole runs": (
        "test_checkpoint_runs.py",
        "test_flips.py",
        "test_full_disk.py",
        "test_hosts.py",
        "test_mixture.py",
        "test_readme.py",
        "test_resume.py",
        "test_short_ways.py",
        "test_slurm.py",
        "test_spare.py",
        "test_store_runs.py",
    ),
}

# What `make check` has time for in its two minutes; test_short_ways.py trains two real steps.
QUICK: tuple[str, ...] = (
    "test_layout.py",
    "test_areas.py",
    "test_short_ways.py",
    "test_models_analysis.py",
    "test_models_transfer.py",
    "test_decode.py",
    "test_doctor.py",
    "test_files.py",
    "test_gpu.py",
    "test_order.py",
    "test_packing.py",
    "test_preprocess.py",
    "test_randaug.py",
    "test_tar.py",
    "test_accounting.py",
    "test_config.py",
    "test_evaluate.py",
    "test_finetune.py",
    "test_optimizer.py",
    "test_probe.py",
    "test_protocols.py",
    "test_telemetry.py",
    "test_watchdog.py",
    "test_command_line.py",
    "test_configuration_page.py",
    "test_versions.py",
    "test_data_commands.py",
    "test_monitoring.py",
    "test_ways_in.py",
    "test_weights_commands.py",
)


def area_of(file: str) -> str:
    """The area of a test file, by its name; "other" for one that the table does not name."""
    for area, files in AREAS.items():
        if file in files:
            return area
    return "other"


if __name__ == "__main__":
    print(*(f"tests/{file}" for file in QUICK))
