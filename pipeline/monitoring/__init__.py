"""What a run says of itself, where its time went, and who holds it up."""
