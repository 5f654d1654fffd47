"""How codes lie in memory: mxref's own packed storage, and exchange with other libraries."""
