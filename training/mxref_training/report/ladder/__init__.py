"""The report of a ladder as a page, a table and a text."""
