"""Proofs for all inputs: the quantizers' kernels compute what the clauses of the specification say.

`make prove`, or `python -m prove` with tests/ on the path. `kernels` compiles without a GPU. `ttir` turns Triton's IR
into `terms` of bits, `turned` reads kernels that turn their tile around, and `ptx` has the instructions of inline
assembly. `clauses` are such terms too, written from the text of the specification, and `smtlib` writes them for other
solvers. `theorems` says what is proved and in which steps; `transforms` and `decoding` are theorems on other kernels,
and `layouts`, `columns` and `dual` say where everything lies. `solver` decides each step, `counterexamples` shows what
does not hold, `certificates` keeps what was proved. docs/explanation/proofs.rst says what it means.
"""
