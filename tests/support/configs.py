"""The config of a training stage, with the keys of all extras."""

from pipeline.extras.async_evaluation import AsyncConfig
from pipeline.extras.best import BestConfig
from pipeline.extras.branches import BranchConfig
from pipeline.extras.replays.spikes import SpikeConfig
from pipeline.extras.token_dropping import TokenDroppingTrainConfig
from pipeline.hooks import compose

FullConfig = compose(BranchConfig, TokenDroppingTrainConfig, AsyncConfig, SpikeConfig, BestConfig)
