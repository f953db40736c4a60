"""More sources for packing shards: tables of image paths, Parquet files, archives, and existing tars."""
