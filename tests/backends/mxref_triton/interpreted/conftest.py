"""Kernels are interpreted or compiled for a whole process, so these tests have one of their own.

The test in `test_triton.py` starts it. By hand it is
`TRITON_INTERPRET=1 pytest tests/backends/mxref_triton/interpreted`.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]

if not collect_ignore_glob:
    from interpreted import patched_once

    patched_once.install()
