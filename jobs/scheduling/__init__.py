"""Who gets which places of a Ray cluster: room, placement groups, and the queue of campaigns."""
