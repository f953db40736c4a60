"""Shards that lie in an object store: asked for by range, fetched whole, kept on the node."""
