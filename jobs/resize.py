"""Run a recipe's resize stage alone: python -m jobs.resize RECIPE [key=value …]"""

import sys

from jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(kind="resize"))
