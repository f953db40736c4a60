"""The attempts of a stage: run and watched, restarted or given up."""
