"""Everything on data that training does without."""
