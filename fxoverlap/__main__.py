"""`python -m fxoverlap`: the command line of `fxoverlap.cli`."""

import sys

from fxoverlap.cli import main

if __name__ == "__main__":
    sys.exit(main())
