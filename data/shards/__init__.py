"""Tar shards: found, indexed, fetched, read, packed and examined."""
