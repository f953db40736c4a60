"""Campaigns, stages and the cluster they run on."""
