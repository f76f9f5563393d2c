"""``python -m starwire`` is the command ``starwire``."""

import sys

from starwire_run.command import main

sys.exit(main())
