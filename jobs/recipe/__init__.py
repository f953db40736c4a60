"""Turn a recipe into a campaign: ordered stages with their keys, inputs and checks."""
