"""Logs and metrics of a run, accounting of the run's time, and the watchdog."""
