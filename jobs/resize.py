"""Run a recipe's resize stage alone: python -m jobs.resize RECIPE [key=value …]"""

from jobs.__main__ import run_one

if __name__ == "__main__":
    run_one("resize")
