"""The commands `patchline checkpoints …`, which read and delete the checkpoints of a run."""
