"""The templates of the pages, with what all pages share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxref_training.report.palette import painted, variables

if TYPE_CHECKING:
    from jinja2 import Template


def template(name: str) -> Template:
    """Return a template of this package by its path; it knows the palette, and refuses a variable without a value."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mxref_training.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.globals["palette"] = variables(":root")
    environment.filters["painted"] = painted
    return environment.get_template(name)
