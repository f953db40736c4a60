"""The core's commands, one file for each group of related commands."""
