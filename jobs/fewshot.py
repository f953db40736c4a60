"""Run a recipe's few-shot stage alone: python -m jobs.fewshot RECIPE [key=value …]"""

from jobs.__main__ import run_one

if __name__ == "__main__":
    run_one("fewshot")
