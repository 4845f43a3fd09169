"""``msda info``: what this installation is and how it would run."""

import argparse
from typing import Any

import msda
from msda.cli.errors import CommandError


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    summary = "show the version, the instruction set in use, OpenMP and the default number of threads"
    parser = subparsers.add_parser("info", help=summary, description=summary.capitalize() + ".")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print `msda.runtime_info()`, one aligned line for each entry."""
    try:
        found = msda.runtime_info()
    except ValueError as error:  # an environment variable that holds no number of threads
        raise CommandError(error) from None
    entries = {name.replace("_", " "): _text(value) for name, value in found.items()}
    width = max(map(len, entries))
    for name, text in entries.items():
        print(f"{name:<{width}}  {text}")
    return 0


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
