"""Run a recipe's fine-tuning stage alone: python -m jobs.finetune RECIPE [key=value …]"""

from jobs.__main__ import run_one

if __name__ == "__main__":
    run_one("finetune")
