"""Run a recipe's evaluate stage alone: python -m jobs.evaluate RECIPE [key=value …]"""

import sys

from jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(kind="evaluate"))
