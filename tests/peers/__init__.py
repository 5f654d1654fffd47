"""Other implementations of MXFP4 on the same crafted inputs, and the page of where they differ from mxref.

One module per peer, which alone imports it; `python -m peers` runs all of them and writes the table.
"""
