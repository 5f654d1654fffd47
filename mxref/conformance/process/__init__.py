"""Checks answered in processes of their own."""
