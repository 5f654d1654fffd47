"""The scalar oracle, as `oracle.scalar` has it."""

from oracle.scalar import *  # noqa: F403
