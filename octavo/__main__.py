"""`python -m octavo` is the command `octavo`."""

import sys

from octavo.cli.main import main

sys.exit(main())
