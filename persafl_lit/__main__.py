"""`python -m persafl_lit` is `persafl`."""

import sys

from persafl_lit.cli import main

sys.exit(main())
