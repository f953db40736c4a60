"""Stages and commands that pack images into data sets, or index existing tars."""
