"""Run a recipe's pretraining stage alone: python -m jobs.pretrain RECIPE [key=value …]"""

import sys

from jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(kind="pretrain"))
