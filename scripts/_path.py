"""Puts the checkout first on sys.path, before anything that PyPI also calls `kernels`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
