"""Optional training features; the core does not depend on any of them."""
