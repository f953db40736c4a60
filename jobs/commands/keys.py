"""Every key that a recipe may have, as a page: python -m jobs.commands.keys > docs/configuration.md"""

from jobs.cluster_config import ClusterConfig
from jobs.recipe.configuration_page import page
from jobs.recipe.sweeps import SweepConfig
from jobs.stages.kinds import KINDS
from jobs.trackers_config import TrackersConfig

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m jobs.commands.keys > docs/configuration.md`; change the comments beside the fields. -->

A recipe is a YAML file. Its top level holds these keys:

| key | default | values | meaning |
|---|---|---|---|
| `run` | `runs/<the recipe's name>` | path | the run directory, on a disk that all nodes share |
| `cluster` | see below | section | how many workers run the stages, and on what |
| `trackers` | see below | section | W&B and MLflow, each used where it is told where |
| any other | none | section | a stage: its name is the key, its kind is the key too unless it says `kind: …` |

A recipe writes only what differs from the defaults. The same keys can be typed after a command, with dots between the
levels: `python -m jobs run recipe.yaml pretrain.optim.lr=1e-3 cluster.workers=8`. Below, the keys of a stage are
written from the stage's section on: `optim.lr`. `<name>` stands for a name that you choose.

The column "on resume" says what happens when a key is changed and a half-done stage is run again:

- **free**: the stage goes on with the new value.
- **warn**: the stage goes on with the new value and says so; numbers before and after may not compare.
- **forbid**: the stage refuses to go on and shows the difference, because it would not be the same training any more.
  Undo the change, or start the stage over with `--fresh`. Only these keys decide whether a finished stage is skipped.

Keys that name an input (`init`, `data.train`, `data.evaluate`, …) take a path or another stage of the recipe: `@stage`
for its weights, `@stage/name` for a set of shards that a `pack` stage makes.

Any stage's section may hold a `sweep`, which makes many stages of it ([sweeps.md](sweeps.md)).
"""


def configuration_page() -> str:
    """Return docs/configuration.md as it should be."""
    stages = {}
    for name, kind in KINDS.items():
        stages[name] = (kind.config, kind.defaults)
    shared = {"cluster": ClusterConfig, "trackers": TrackersConfig, "sweep": SweepConfig}
    return page(INTRODUCTION, shared, stages)


if __name__ == "__main__":
    print(configuration_page(), end="")
