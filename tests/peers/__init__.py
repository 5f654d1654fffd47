"""Other implementations of MXFP4 on the same crafted inputs, and the page that shows where they differ from mxref.

Each peer has one module, and only this module imports the peer. `python -m peers` runs all and writes the table.
"""
