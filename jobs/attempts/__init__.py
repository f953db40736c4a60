"""The attempts of a stage: on how many workers, run and watched, restarted or given up."""
