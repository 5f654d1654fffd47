"""A report as a list of blocks, which one template writes as HTML and `markdown` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError
from mxref.printable import printable
from mxref_training.durable import explained, make_folder, replace_text
from mxref_training.report.palette import painted, variables
from mxref_training.report.table import Table, markdown_text


@dataclass
class Page:
    """A report; its blocks are added from top to bottom. Texts may hold anything: each form escapes them."""

    title: str
    blocks: list[tuple[str, Any, str]] = field(default_factory=list)
    """Kind, content and caption of each block."""

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading."""
        self.blocks.append((f"h{level}", text, ""))

    def text(self, text: str, kind: str = "") -> None:
        """Add a paragraph: `lead`, `headline`, `strong`, `note` or plain. Words in backticks are code."""
        if text:
            self.blocks.append(("text", text, kind))

    def items(self, texts: Sequence[str]) -> None:
        """Add a list."""
        if texts:
            self.blocks.append(("items", texts, ""))

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Add numbers, each with what it is."""
        self.blocks.append(("facts", facts, ""))

    def table(self, table: Table, note: str = "") -> None:
        """Add a table."""
        self.blocks.append(("table", table, note))

    def figure(self, svg: str, caption: str = "") -> None:
        """Add a figure, which HTML alone shows."""
        self.blocks.append(("figure", svg, caption))

    def terms(self, terms: Sequence[tuple[str, str]]) -> None:
        """Add names with their values."""
        self.blocks.append(("terms", terms, ""))

    def code(self, title: str, text: str) -> None:
        """Add a TOML file, folded in HTML."""
        self.blocks.append(("code", text, title))

    def html(self) -> str:
        """Return the page as one file that needs no other."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("mxref_training.report", "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
        )
        environment.filters["painted"] = painted
        page = environment.get_template("page.html.j2")
        return printable(page.render(title=self.title, blocks=self.blocks, palette=variables(":root")))

    def markdown(self) -> str:
        """Return the page as Markdown, without its figures."""
        parts = [f"# {markdown_text(self.title)}", *(_markdown(*block) for block in self.blocks)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, folder: Path, name: str, way_out: str) -> tuple[Path, Path]:
        """Write NAME.html and NAME.md into a folder, made if need be, each in one piece, and return their paths.

        Raises:
            FileFormatError: a file cannot be written; an older one is left as it was.
        """
        paths = folder / f"{name}.html", folder / f"{name}.md"
        texts = self.html(), self.markdown()
        with explained(FileFormatError, f"write to {folder}", way_out):
            make_folder(folder)
        for path, text in zip(paths, texts, strict=True):
            with explained(FileFormatError, f"write {path}", way_out):
                replace_text(path, text)
        return paths


def _markdown(kind: str, content: Any, caption: str) -> str:
    match kind:
        case "h2" | "h3":
            return f"{'#' * int(kind[1])} {markdown_text(content)}"
        case "text":
            text = markdown_text(content)
            return f"**{text}**" if caption in ("headline", "strong") else text
        case "items":
            return "\n".join(f"- {markdown_text(text)}" for text in content)
        case "facts":
            return "\n".join(f"- {markdown_text(what)}: {markdown_text(value)}" for value, what in content)
        case "terms":
            return "\n".join(f"- {markdown_text(name)}: {markdown_text(value)}" for name, value in content)
        case "table":
            return "\n".join(content.markdown()) + (f"\n\n{markdown_text(caption)}" if caption else "")
        case "code":
            return f"{markdown_text(caption)}:\n\n```toml\n{printable(content).strip()}\n```"
    return ""
