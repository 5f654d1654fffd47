"""How fast the CPU backend is, beside copying memory, PyTorch's products, and other packages.

`python -m bench.bench_cpu` measures, prints one table, and writes JSON; `render` makes a page of it.
"""
