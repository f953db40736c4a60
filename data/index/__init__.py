"""What is known about a set of tar shards: its index, as objects and as files, and the tars that it is made of."""
