"""Visualise trained weights: attention maps and distances, patch filters, position embeddings."""
