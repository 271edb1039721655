"""Settings of the whole suite: properties without deadlines, OpenMP without spinning.

A deadline would test how busy the machine is. Threads that spin while they wait make small models
crawl when two test processes share the cores; OpenMP reads this when torch is first imported.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile("fairlead", deadline=None, print_blob=True)
settings.load_profile("fairlead")
