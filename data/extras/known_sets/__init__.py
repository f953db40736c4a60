"""Data sets as their owners distribute them: ImageNet, ObjectNet, VTAB."""
