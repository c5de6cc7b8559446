"""What these tests need of the machine, found out once; `make faults` says so before, and does not begin without."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
