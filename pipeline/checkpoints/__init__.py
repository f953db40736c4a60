"""Write, commit, verify, read and delete checkpoints."""
