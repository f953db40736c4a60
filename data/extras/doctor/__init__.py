"""Check sets, print their statistics, repair them."""
