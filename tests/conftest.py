"""Settings for all tests."""

import os

from hypothesis import settings

# In CI the same examples are tried on every run; elsewhere new ones. Deadlines only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")
