"""Fine-tuning with a fresh zero head (paper, B.1.1 and table 4)."""

from jobs.stages import training
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import TrainConfig

Config = TrainConfig
DEFAULTS = TrainConfig(
    model={"representation": None},  # both layers of the pretraining head go (paper, 3.1 and B.1.1)
    new_head=True,
    optim=OptimConfig(
        name="sgd",
        lr=0.03,  # of the grid 0.003, 0.01, 0.03, 0.06 (paper, table 4)
        weight_decay=0.0,
        schedule=ScheduleConfig(decay="cosine", warmup_steps=500),  # vit_jax configs/common.py
    ),
    loss="softmax",
    steps=20_000,  # ImageNet (paper, table 4)
    batch_size=512,
)
INPUTS = training.INPUTS
FILES = training.FILES
run = training.run
