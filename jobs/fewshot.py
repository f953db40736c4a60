"""Run a recipe's few-shot stage alone: python -m jobs.fewshot RECIPE [key=value …]"""

import sys

from jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(kind="fewshot"))
