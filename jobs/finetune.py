"""Run a recipe's fine-tuning stage alone: python -m jobs.finetune RECIPE [key=value …]"""

import sys

from jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(kind="finetune"))
