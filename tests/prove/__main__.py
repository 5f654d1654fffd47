"""`python -m prove`: prove what has no valid certificate, one question at a time, and record each theorem.

A stopped run continues where it was: certificates are written as they are made. Exit code 1 if a theorem is refuted or
has no proof.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path

import click

from prove.certificates import (
    certificate_of,
    decide,
    encoding,
    read_certificates,
    what_is_stale,
    write_certificates,
)
from prove.foreign_certificates import prove_foreign
from prove.foreign_kernels import subjects
from prove.kernels import TARGETS, cases, compile_cases, undecided
from prove.questions import NotProved
from prove.smtlib import write_clauses
from prove.ttir import UnknownOperation


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=click.Choice([*TARGETS, "all"]), default="all", show_default=True)
@click.option("--only", metavar="PATTERN", default="*", help="Cases to prove, as in a shell.")
@click.option("--limit", type=float, default=0.0, help="Seconds for one question; 0 for no limit.")
@click.option("--again", is_flag=True, help="Ask every question anew, whatever was proved.")
@click.option("--list", "listed", is_flag=True, help="List what was proved, and stop.")
@click.option("--clauses", is_flag=True, help="Write the clauses as SMT-LIB into spec/smt, and stop.")
@click.option("--foreign", is_flag=True, help="Prove kernels of other projects, as far as they are found.")
@click.option("--sources", type=click.Path(path_type=Path), help="Folder with checkouts, for --foreign.")
def main(
    target: str,
    only: str,
    limit: float,
    again: bool,
    listed: bool,
    clauses: bool,
    foreign: bool,
    sources: Path | None,
) -> None:
    """Prove for all inputs that the quantizers' kernels are their clauses."""
    if clauses:
        write_clauses()
        return
    if foreign:
        names = [name for name in subjects() if fnmatchcase(name, only)]
        failed = 0
        for right, line in prove_foreign(names, sources, limit, again):
            click.echo(line)
            failed += not right
        sys.exit(bool(failed))
    certificates = read_certificates()
    if listed:
        for c in certificates.values():
            click.echo(f"{c.target} {c.case}: {c.seconds} s, {c.solver}, assumes {', '.join(c.assumptions)}")
        return
    known = {} if again else _answered()
    failed = 0
    for machine in TARGETS if target == "all" else [target]:
        names = []
        for name, case in cases().items():
            if fnmatchcase(name, only):
                if reason := undecided(case, machine):
                    click.echo(f"- {machine} {name}: not decided, {reason}")
                else:
                    names.append(name)
        for compiled in compile_cases(machine, names):
            key = compiled.case, machine
            try:
                old = certificates.get(key)
                if old is not None and not again and what_is_stale(old, compiled) is None:
                    click.echo(f"· {machine} {compiled.case}: certificate is valid")
                    continue
                steps = list(decide(compiled, known, limit))
            except (NotProved, UnknownOperation) as err:
                certificates.pop(key, None)
                click.echo(f"✗ {machine} {compiled.case}: {err}")
                failed += 1
                continue
            certificates[key] = certificate_of(compiled, steps)
            write_certificates(certificates)
            click.echo(f"✓ {machine} {compiled.case}: {len(steps)} questions, {certificates[key].seconds} s")
    sys.exit(bool(failed))


def _answered() -> dict[str, float]:
    """Return the seconds of the questions that this solver answered before, by digest."""
    from prove.solver import VERSION

    return {
        str(digest): float(str(seconds))
        for c in read_certificates().values()
        if c.solver == VERSION and c.encoding == encoding()
        for questions in c.steps.values()
        for digest, seconds in questions
    }


if __name__ == "__main__":
    main()
