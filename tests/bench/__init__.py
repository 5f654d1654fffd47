"""Speed of the CPU backend, compared with copying memory, PyTorch's products, and other packages.

`python -m bench.bench_cpu` measures, prints one table, and writes JSON; `render` makes a page of it.
"""
