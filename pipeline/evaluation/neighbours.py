"""kNN: the training samples whose features point most nearly where a test sample's do vote for its class.

1. Features are scaled to length 1; the similarity of two is their product, the cosine of the angle between them.
2. Of each test sample the k most similar training samples are found, block by block: what is in memory at a time is a
   block of each set and their similarities, whatever the sets' sizes are.
3. Weighted as in DINO's eval_knn.py (Caron et al. 2021, appendix F.1), each votes with exp(similarity / 0.07);
   plain, with 1. The class with the most votes is the prediction; of equal ones the lowest.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from data.checks import more_than_0
from pipeline.config import require
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.group import Beat

# n test rows of a block, k neighbours, D features, C classes

TEST_BLOCK = 1024  # with a block of 4,096 training rows: 16 MiB of similarities


@dataclass(frozen=True)
class NeighboursConfig:
    """Protocol knn: a vote of the nearest training samples."""

    k: tuple[int, ...] = (10, 20)  # neighbours that vote; a value each (DINO eval_knn.py: 20 did best)
    weighted: bool = True  # by exp(cosine / temperature); else each neighbour has one vote
    temperature: float = 0.07  # of the weights (DINO eval_knn.py)

    def __post_init__(self) -> None:
        require(min(self.k, default=0) > 0, f"knn.k is {self.k}, expected 1 or more neighbours")
        more_than_0(self, "temperature", "knn.")


def knn(
    train: FeatureStore, test: FeatureStore, cfg: NeighboursConfig, device: torch.device, beat: Beat
) -> dict[int, np.ndarray]:
    """Return {k: the class (test rows,) that its k nearest training rows vote for}; `beat` as in Beat."""
    labels = torch.from_numpy(train.first_labels).to(device)
    classes = int(labels.max()) + 1
    predicted: dict[int, list[Tensor]] = {k: [] for k in cfg.k}
    for _, queries in test.blocks(size=TEST_BLOCK):
        similarities, neighbours = nearest(train, normalize(queries.to(device)), max(cfg.k), beat)
        weights = torch.ones_like(similarities, dtype=torch.float64)
        if cfg.weighted:
            weights = (similarities.double() / cfg.temperature).exp()
        for k in cfg.k:
            predicted[k].append(vote(labels[neighbours[:, :k]], weights[:, :k], classes))
    return {k: torch.cat(parts).cpu().numpy() for k, parts in predicted.items()}


def nearest(train: FeatureStore, queries: Tensor, k: int, beat: Beat) -> tuple[Tensor, Tensor]:
    """Return the k largest similarities (n, k) of each query (n, D), largest first, and whose they are.

    Neighbours are counted among the rows of `train` that are there.
    """
    best = queries.new_empty(len(queries), 0)
    places = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for place, features in train.blocks():
        similarities = queries @ normalize(features.to(queries.device)).T
        numbers = torch.arange(place.start, place.stop, device=queries.device).expand(len(queries), -1)
        # The best so far compete with those of this block.
        candidates = torch.cat([best, similarities], dim=1)
        best, chosen = candidates.topk(min(k, candidates.shape[1]), dim=1)
        places = torch.cat([places, numbers], dim=1).gather(1, chosen)
        beat()
    return best, places


def vote(labels: Tensor, weights: Tensor, classes: int) -> Tensor:
    """(n, k) labels and weights → (n,) the class with the most votes."""
    votes = torch.zeros(len(labels), classes, dtype=torch.float64, device=labels.device)
    every_row = torch.arange(len(labels), device=labels.device)
    # One neighbour at a time: added at once, a GPU would sum them in an order of its own each time.
    for neighbour in range(labels.shape[1]):
        votes[every_row, labels[:, neighbour]] += weights[:, neighbour]
    return votes.argmax(1)
