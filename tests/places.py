"""Where the tests find the repository."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
