"""Pretraining from random weights (paper, section 4.1 and table 3).

python -m jobs.pretrain recipe.yaml [key=value …]
"""

from jobs.stages import training as trained
from pipeline.training_config import TrainConfig

Config = TrainConfig
DEFAULTS = TrainConfig(passes=7)  # over JFT-300M (paper, table 3)
INPUTS = trained.INPUTS
run = trained.run
