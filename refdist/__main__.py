"""`python -m refdist` is the `refdist` command."""

import sys

from refdist.cli.main import main

sys.exit(main())
