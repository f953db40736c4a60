"""Images that lie neither in folders nor in tars to index: tables of paths, parquet, archives, tars to pack anew."""
