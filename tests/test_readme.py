"""The README's example prints what the README says, and its links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_is_written():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (printed,) = re.findall(r"prints\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue() == printed


def test_relative_links_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
