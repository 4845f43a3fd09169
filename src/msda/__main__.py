"""``python -m msda``."""

import sys

from msda.cli import main

if __name__ == "__main__":
    sys.exit(main())
