"""Pack a recipe's images into shards: python -m jobs.pack RECIPE [key=value …]"""

import sys

from jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(kind="pack"))
