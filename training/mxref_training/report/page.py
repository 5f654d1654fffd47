"""A report as a list of blocks, which one template writes as HTML and `markdown` as Markdown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mxref.errors import FileFormatError
from mxref.printable import printable
from mxref_training.durable import explained, make_folder, replace_text
from mxref_training.report.palette import variables
from mxref_training.report.table import markdown_text

Kind = Literal["h2", "h3", "text", "items", "terms", "table", "figure", "code"]


@dataclass
class Page:
    """A report; its blocks are added from top to bottom. Texts may hold anything: each form escapes them."""

    title: str
    blocks: list[tuple[Kind, Any, str]] = field(default_factory=list)
    """Kind, content and caption of each block."""

    def add(self, kind: Kind, content: Any, caption: str = "") -> None:
        """Add a block, unless its content is empty.

        Args:
            kind: what it is.
            content: a str of headings, text (words in backticks are code), figures (SVG, in HTML alone) and code
                (TOML); a list of texts for items; of pairs for terms; a Table.
            caption: below a table or figure; the title of code; of text its look: `lead`, `headline`, `strong`, `note`.
        """
        if content:
            self.blocks.append((kind, content, caption))

    def html(self) -> str:
        """Return the page as one file that needs no other."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("mxref_training.report", "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
        )
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


def _markdown(kind: Kind, content: Any, caption: str) -> str:
    match kind:
        case "h2" | "h3":
            return f"{'#' * int(kind[1])} {markdown_text(content)}"
        case "text":
            text = markdown_text(content)
            return f"**{text}**" if caption in ("headline", "strong") else text
        case "items":
            return "\n".join(f"- {markdown_text(text)}" for text in content)
        case "terms":
            return "\n".join(f"- {markdown_text(name)}: {markdown_text(value)}" for name, value in content)
        case "table":
            return f"{content.markdown()}\n\n{markdown_text(caption)}".strip()
        case "code":
            return f"{markdown_text(caption)}:\n\n```toml\n{printable(content).strip()}\n```"
    return ""
