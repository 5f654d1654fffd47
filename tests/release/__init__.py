"""Builds what is published, and tries the wheel alone: no checkout, declared dependencies only, no network."""
