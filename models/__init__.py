"""The networks of the paper and the weights that go in and out of them."""
