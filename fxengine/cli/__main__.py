"""`python -m fxengine.cli`, for where the console script is not on the path."""

import sys

from fxengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
