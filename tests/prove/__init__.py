"""Proofs for all inputs: the row quantizer's kernels compute what the clauses of the specification say.

`make prove`, or `python -m prove` with tests/ on the path. `kernels` compiles without a GPU, `ttir` turns Triton's IR
into `terms` of bits, and `ptx` the instructions of inline assembly. `clauses` are such terms too, written from the text
of the specification, and `smtlib` writes them for other solvers. `theorems` says what is proved and in which steps,
`solver` decides each step, `certificates` keeps what was proved. docs/explanation/proofs.rst says what it means.
"""
