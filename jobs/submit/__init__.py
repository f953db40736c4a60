"""Run campaigns as Ray jobs: `submit`, `list`, `logs` and `stop`."""
