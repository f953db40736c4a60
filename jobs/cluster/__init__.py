"""Runs one function on N workers, on Ray or as plain processes, and submits a campaign as a Ray job."""
