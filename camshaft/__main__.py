"""`python -m camshaft`, the same as the command `camshaft`."""

import sys

from camshaft.cli import main

sys.exit(main())
