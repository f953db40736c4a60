"""Sources of samples to pack: class folders, lists of paths, Parquet files, archives, tars, object stores."""
