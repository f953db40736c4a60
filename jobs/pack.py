"""Pack a recipe's images into shards: python -m jobs.pack RECIPE [key=value …]"""

from jobs.__main__ import run_one

if __name__ == "__main__":
    run_one("pack")
