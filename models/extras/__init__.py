"""Optional parts of the package: masked patch prediction, analysis of trained models, and foreign weight formats."""
