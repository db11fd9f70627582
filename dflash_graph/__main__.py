"""`python -m dflash_graph`: the same as the console script `dflash-graph`."""

import sys

from dflash_graph.cli import main

if __name__ == "__main__":
    sys.exit(main())
