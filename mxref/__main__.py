"""The command line as `python -m mxref`, for launchers that start a Python module, such as torchrun."""

from mxref.cli import main

main()
