"""Run a recipe's evaluate stage alone: python -m jobs.evaluate RECIPE [key=value …]"""

from jobs.__main__ import run_one

if __name__ == "__main__":
    run_one("evaluate")
