"""What several tests share is imported by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
