"""A recipe becomes a campaign: stages in order, each with its key, its checks and its inputs."""
