"""`python -m tk`: the command line, without an installed `tk` script."""

import sys

from .cli.main import main

sys.exit(main())
