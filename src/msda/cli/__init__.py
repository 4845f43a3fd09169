"""The command line: ``python -m msda``, also installed as ``msda``.

Each subcommand is one module with ``add_parser(subparsers)``, which sets ``run`` as a default of its
parser, and ``run(args) -> int``, which returns the exit status or raises `CommandError`. An OSError that
leaves ``run`` is taken for one of standard output: those of files are for ``run`` to report.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence

import msda
from msda.cli import bench, grad, info
from msda.cli.errors import CommandError, one_line

SUBCOMMANDS = (grad, bench, info)

FAILED = 2  # also argparse's status for a wrong command line
INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, or that of the process, and return its exit status.

    Help, the version and a wrong command line leave by SystemExit, as is usual with argparse.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that the terminal cannot show must not end the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    command = "msda"
    try:
        try:
            parser = _parser()
            args = parser.parse_args(argv)
            if args.command is None:
                parser.print_help(sys.stderr)
                return FAILED
            command = f"msda {args.command}"
            status: int = args.run(args)
            return status
        finally:
            # Here rather than at the interpreter's exit, which would report a failure in its own words.
            print(end="", flush=True)
    except CommandError as error:
        return _failed(command, error)
    except MemoryError as error:
        return _failed(command, f"not enough memory: {error}" if str(error) else "not enough memory")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return PIPE_CLOSED
    except OSError as error:
        _abandon_stdout()
        return _failed(command, f"cannot write to standard output: {error.strerror}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msda",
        description="Multi-scale deformable attention on the CPU, with the same bits every time.",
    )
    parser.add_argument("--version", action="version", version=f"msda {msda.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser


def _failed(command: str, message: object) -> int:
    print(f"{command}: error: {one_line(message)}", file=sys.stderr)
    return FAILED


def _abandon_stdout() -> None:
    """Let what stdout still holds go nowhere, so that the flush at the interpreter's exit is silent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
