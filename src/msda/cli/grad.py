"""``msda grad``: the output and the gradients of one call, with their digests."""

import argparse
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import msda
from msda.arguments import FLOAT_NAMES
from msda.cli import cases, workloads
from msda.cli.digests import digest
from msda.cli.errors import CommandError, shown
from msda.reference import NUMERICS_VERSION
from msda.threads import check_num_threads

_DESCRIPTION = """\
Compute the output and the three gradients of one call, and print their norms and SHA-256 digests, which
are the same on every run, for any number of threads and on every machine. Without CASE a call of the size
of Deformable-DETR's decoder is made from a fixed recipe."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "grad", help="compute output and gradients of a case, print their digests", description=_DESCRIPTION
    )
    parser.add_argument(
        "case", nargs="?", metavar="CASE", help=f".npz file with the keys {', '.join(cases.INPUTS)}"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the results to this file, in .npz format"
    )
    parser.add_argument(
        "--threads", type=_thread_count, metavar="N", help="use at most N threads (no result depends on it)"
    )
    parser.add_argument("--dtype", choices=FLOAT_NAMES, help="round the case's floats to this type first")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read or make the case, compute, write the results if asked to, and print the tables."""
    dtype = None if args.dtype is None else cases.dtype_named(args.dtype)
    if args.output is not None:
        cases.check_output(args.output, args.case)
    if args.case is None:
        origin = "decoder case made from a fixed recipe: its digests are the same on every machine"
        case = workloads.make("decoder")
    else:
        origin = f"case {shown(args.case)}"
        case = cases.read(args.case)
    if dtype is not None:
        origin += f" (floats rounded to {dtype.name})"
        case = cases.cast(case, dtype)

    value, shapes, starts, locations, weights, grad_output = (case[name] for name in cases.INPUTS)
    try:
        start = time.perf_counter()
        output = msda.forward(value, shapes, starts, locations, weights, num_threads=args.threads)
        middle = time.perf_counter()
        gradients = msda.backward(
            value, shapes, starts, locations, weights, grad_output, num_threads=args.threads
        )
        end = time.perf_counter()
        threads = msda.get_num_threads() if args.threads is None else args.threads
    except (TypeError, ValueError) as error:
        raise CommandError(error if args.case is None else f"{shown(args.case)}: {error}") from None

    results = {"output": output} | {f"grad_{name}": array for name, array in gradients._asdict().items()}
    if args.output is not None:
        cases.write(args.output, results)

    print(f"{origin}\n")
    _print_tables(results)
    print(
        f"\nforward {_duration(middle - start)}, backward {_duration(end - middle)}"
        f" (one call each, not warmed up; threads: at most {threads})"
    )
    return 0


def _thread_count(text: str) -> int:
    try:
        return check_num_threads(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}") from None


def _print_tables(results: Mapping[str, NDArray[Any]]) -> None:
    """Print shape, dtype and norm of each result, then its digest, as sha256sum would list it."""
    rows = [("", "shape", "dtype", "L2 norm")]
    for name, array in results.items():
        rows.append((name, str(array.shape), array.dtype.name, f"{_norm(array):.6g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    print(f"\nSHA-256 (numerics {NUMERICS_VERSION})")
    for name, array in results.items():
        print(f"{digest(array)}  {name}")


def _norm(array: NDArray[Any]) -> float:
    """Return the Euclidean norm, in float64 and without overflow on the way."""
    with np.errstate(all="ignore"):
        magnitudes = np.abs(array.astype(np.float64))
        largest = float(magnitudes.max(initial=0.0))
        if largest == 0.0 or not math.isfinite(largest):
            return largest
        return largest * math.sqrt(float(np.square(magnitudes / largest).sum()))


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
