"""Settings of every property test. A deadline would test how busy the machine is, so there is none."""

from hypothesis import settings

settings.register_profile("fairlead", deadline=None, print_blob=True)
settings.load_profile("fairlead")
