"""Makes the helpers beside the tests importable, whatever pytest's import mode."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# The same examples in every run: a failure that others cannot repeat helps nobody.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
