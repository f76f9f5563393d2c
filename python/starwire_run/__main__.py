"""``python -m starwire_run`` is ``starwire``."""

import sys

from starwire_run.command import main

sys.exit(main())
