"""What DeepSpeed is given and how it is told from outside: parameters, norms, the user's own file."""
