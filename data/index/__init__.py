"""What is known about a set of tar shards: its index, as objects and as files."""
