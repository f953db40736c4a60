"""What a stage will need before it runs: memory, time, money."""
