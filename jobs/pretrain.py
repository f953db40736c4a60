"""Run a recipe's pretraining stage alone: python -m jobs.pretrain RECIPE [key=value …]"""

from jobs.__main__ import run_one

if __name__ == "__main__":
    run_one("pretrain")
