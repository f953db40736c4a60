"""A campaign at work: one command on a run, its stages one after the other, and how that ends."""
