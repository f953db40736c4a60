"""Readers of public data sets in the format that their authors distribute: ImageNet, ObjectNet, VTAB and others."""
