"""Read shards in an object store by byte range, or download them completely into a cache on the node."""
