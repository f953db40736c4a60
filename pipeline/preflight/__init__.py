"""What `jobs preflight` measures on every worker and node: links, disks, storage, memory."""
