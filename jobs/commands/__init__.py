"""Core commands, one file per group of related commands."""
