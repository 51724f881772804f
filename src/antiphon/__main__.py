"""`python -m antiphon`: the same as the `antiphon` command."""

import sys

from antiphon.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
