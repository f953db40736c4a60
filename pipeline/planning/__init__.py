"""What a training run will need and take, known before it starts."""
