"""Read tar shards, and yield batches of uint8 images in an exactly defined order."""
