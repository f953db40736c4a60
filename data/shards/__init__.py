"""Pack, index, read and subset tar shards."""
