"""Shards in an object store: read by byte range, downloaded whole, and cached on the node."""
