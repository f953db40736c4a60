"""Pretraining from random weights (paper, section 4.1 and table 3).

python -m jobs.pretrain recipe.yaml [key=value …]
"""

from jobs import trained
from pipeline.stage import TrainConfig

Config = TrainConfig
DEFAULTS = TrainConfig(passes=7)  # over JFT-300M (paper, table 3)
INPUTS = trained.INPUTS
run = trained.run

if __name__ == "__main__":
    from jobs.__main__ import run_one

    run_one("pretrain")
