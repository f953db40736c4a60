"""Pretraining from random weights (paper, section 4.1 and table 3)."""

from jobs.stages import training
from pipeline.training_config import TrainConfig

Config = TrainConfig
DEFAULTS = TrainConfig(passes=7)  # over JFT-300M (paper, table 3)
INPUTS = training.INPUTS
FILES = training.FILES
run = training.run
