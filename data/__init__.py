"""Tar shards in, exactly ordered batches of uint8 images out."""
