"""The index of a set of tar shards, as objects and as files, and the tar format that it describes."""
