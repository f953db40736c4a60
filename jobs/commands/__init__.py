"""What the commands beside `run` do, one file a command."""
