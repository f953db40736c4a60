"""What is looked at before workers train: in short at every start, at length by `jobs preflight`."""
