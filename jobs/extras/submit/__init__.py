"""Submit campaigns as Ray jobs; list, follow and stop the jobs."""
