"""Generates the golden vectors: inputs by rules, results from the scalar oracle, each checked with the reference.

`make vectors` runs `python -m golden`, with `tests` on the path. `mxref vectors` reads and verifies the files.
The generator lives among the tests because the oracle does: nothing that is installed may depend on the oracle.
"""
