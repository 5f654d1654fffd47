"""Observes what a backend does to memory and to its process."""
