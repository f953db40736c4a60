"""A campaign as a Ray job: what it takes along, and `submit`, `list`, `logs`, `stop`."""
