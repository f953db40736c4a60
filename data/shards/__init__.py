"""Tar shards: found, indexed, read, packed and examined."""
