"""What can be typed: one function a command, its words as annotations. Nothing heavy is imported for it."""
