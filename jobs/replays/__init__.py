"""Steps of a run that are taken again, to prove them, to find what broke one, or to do without samples."""
