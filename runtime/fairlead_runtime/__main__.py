"""``python -m fairlead_runtime`` is ``fairlead``."""

import sys

from fairlead_runtime.cli import main

sys.exit(main())
