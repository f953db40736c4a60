"""Logs and metrics of a run, the accounting of its time, and the watchdog."""
