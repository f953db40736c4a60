"""Attention maps, attention distances, filters and position embeddings of trained weights."""
