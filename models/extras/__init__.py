"""Tools that analyse trained models."""
