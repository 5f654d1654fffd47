"""The README as a package index shows it: its relative links lead into the public repository, or become plain text.

An index renders the README by itself, so relative links break there. `[project.urls]` of pyproject.toml names the
repository, once there is one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A Markdown link or image whose target is a path: its mark, text and path."""


def long_description(readme: str, version: str, repository: str | None, pages: str, images: str) -> str:
    """Return the README with the relative links of a released version.

    Args:
        readme: Markdown, with paths relative to the repository's root.
        version: the released version.
        repository: URL of the public repository; without one, links become their text and images vanish.
        pages: where a repository shows a file, with the fields `repository`, `version` and `path`.
        images: where it has the bytes of a file, with the same fields.
    """

    def absolute(found: re.Match[str]) -> str:
        mark, text, path = found.groups()
        if not repository:
            return "" if mark else text
        template = images if mark else pages
        url = template.format(repository=repository.rstrip("/"), version=version, path=path)
        return f"{mark}[{text}]({url})"

    return LINK.sub(absolute, readme)


class ReadmeHook(MetadataHookInterface):
    """Sets `readme` in the metadata of sdist and wheel."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description, from README.md and the templates of pyproject.toml."""
        text = long_description(
            Path(self.root, "README.md").read_text(encoding="utf-8"),
            metadata["version"],
            metadata.get("urls", {}).get("Repository"),
            self.config["pages"],
            self.config["images"],
        )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
