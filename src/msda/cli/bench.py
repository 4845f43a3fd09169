"""``msda bench``: how long calls take, in alternation with other implementations.

What is compared is timed in pairs: ours, theirs, ours, theirs, and so on, in one process. What slows the
machine down for a while slows both, so the median of the pairs' ratios says more than a ratio of medians.
Several settings of ours (threads, dtypes, gradients) take turns in the same way.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import msda
from msda.arguments import FLOAT_NAMES
from msda.cli import cases, workloads
from msda.cli.errors import CommandError, one_line, shown
from msda.cli.peers import PEERS, Call
from msda.threads import check_num_threads, last_team

GRADIENTS = ("value", "sampling_locations", "attention_weights")

#: How far a peer's results may be from ours: relative L2 distances. In float32 arithmetic a position next to
#: the edge of a cell can fall into the wrong cell, where the derivatives by the location are different ones.
TOLERANCES = {
    "output": 1e-3,
    "grad_value": 1e-3,
    "grad_sampling_locations": 5e-2,
    "grad_attention_weights": 1e-3,
}

# Short calls are timed several at a time, so many that they take at least this.
_BATCH_SECONDS = 0.02
# Before each timing. The threads of the call before go on waiting for work, on cores that the next one needs,
# and fall asleep after some milliseconds.
_PAUSE_SECONDS = 0.02

_DESCRIPTION = f"""\
Time forward and backward passes, in alternation with the other implementations that are installed. Before, all
results are compared. Workloads: {", ".join(workloads.WORKLOADS)}, which are run when nothing is named;
{", ".join(workloads.UNUSUAL)}, for all of which "unusual" stands."""


class Setting(NamedTuple):
    """How ours, and theirs, are called."""

    wrt: tuple[str, ...]
    dtype: str | None  # None: as the case has it
    threads: int | None  # None: as the library chooses


class Measurement(NamedTuple):
    """One pass in one setting. Times are in seconds for one call, run by run."""

    workload: str
    dtype: str
    setting: Setting
    forward: bool
    team: int | None  # threads that ran in ours
    against: str | None
    ours: list[float]
    theirs: list[float]  # empty without a peer
    first: list[float]  # ours in the first of the settings
    distances: dict[str, float]  # of their results from ours


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "bench", help="measure the speed, compared with other implementations", description=_DESCRIPTION
    )
    parser.add_argument("names", nargs="*", metavar="WORKLOAD|CASE.npz", help="what to run")
    parser.add_argument(
        "--against",
        type=_against,
        default="installed",
        metavar="PEERS",
        help=f"{','.join(PEERS)}, or one of them; all; none; or installed: those that are (default)",
    )
    parser.add_argument(
        "--threads",
        type=_numbers,
        metavar="N,...",
        help="use at most N threads; several numbers are compared",
    )
    parser.add_argument(
        "--repeats", type=_number, default=7, metavar="N", help="how many runs (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        type=lambda text: _names(text, FLOAT_NAMES),
        metavar="TYPE,...",
        help=f"round the floats to this type first: {', '.join(FLOAT_NAMES)}; several are compared",
    )
    parser.add_argument(
        "--wrt",
        type=lambda text: _names(text, GRADIENTS),
        action="append",
        metavar="NAME,...",
        help=f"compute these gradients, of {', '.join(GRADIENTS)}; given repeatedly, the sets are compared",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure what was asked for, and print it."""
    loaders = _loaders(args.names or list(workloads.WORKLOADS))
    peers, remarks = _chosen_peers(args.against)
    settings = [
        Setting(wrt, dtype, None if threads is None else check_num_threads(threads))
        for wrt in args.wrt or [GRADIENTS]
        for dtype in args.dtype or [None]
        for threads in args.threads or [None]
    ]
    for dtype in args.dtype or []:
        cases.dtype_named(dtype)  # which may need a package
    try:
        default_threads = msda.get_num_threads()
    except ValueError as error:  # an environment variable that holds no number of threads
        raise CommandError(error) from None

    table = _Table(list(loaders), peers, settings, default_threads, args.repeats)
    found: list[Measurement] = []
    with _progress(len(loaders) * max(1, len(peers)) * len(settings) * (1 + args.repeats)) as progress:
        for remark in remarks:
            progress.remark(remark)
        if not args.json:
            progress.print(table.heading())
        for workload, load in loaders.items():
            case = load()
            for against, fitting in _comparisons(workload, case, peers, settings, progress):
                bench = _Bench(workload, case, against, fitting, default_threads)
                measured = bench.measure(args.repeats, progress)
                found += measured
                if not args.json:
                    progress.print(table.rows(measured))
    if args.json:
        document = _document(found, peers, default_threads, args.repeats)
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        print(table.notes())
    return 0


# What was asked for


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_number(part) for part in text.split(",")))


def _names(text: str, choices: Collection[str]) -> tuple[str, ...]:
    """Return the names in a list with commas, each of them known and once."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(choices)})")
    return names


def _against(text: str) -> str | tuple[str, ...]:
    return text if text in ("all", "none", "installed") else _names(text, PEERS)


def _loaders(names: Sequence[str]) -> dict[str, Callable[[], dict[str, NDArray[Any]]]]:
    """Return what makes each workload, or gives the case, which is read now."""
    loaders: dict[str, Callable[[], dict[str, NDArray[Any]]]] = {}
    expanded = itertools.chain.from_iterable(workloads.UNUSUAL if name == "unusual" else [name] for name in names)
    for name in expanded:
        if name in workloads.WORKLOADS or name in workloads.UNUSUAL:
            loaders[name] = lambda name=name: workloads.make(name)  # type: ignore[misc]
        elif name.endswith(".npz") or os.path.dirname(name) or os.path.exists(name):
            case = cases.read(name)
            loaders[shown(name)] = lambda case=case: case  # type: ignore[misc]
        else:
            known = ", ".join([*workloads.WORKLOADS, *workloads.UNUSUAL])
            raise CommandError(f"{name!r} is neither a workload ({known}) nor a file")
    return loaders


def _chosen_peers(against: str | tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the peers to compare with, and remarks on those that are not there."""
    if against == "none":
        return [], []
    asked = list(PEERS) if isinstance(against, str) else list(against)
    missing: dict[str, list[str]] = {}
    for name in asked:
        if not PEERS[name].is_installed():
            missing.setdefault(PEERS[name].install, []).append(name)
    remarks = [
        f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not installed; to install: {command}"
        for command, names in missing.items()
    ]
    if remarks and against != "installed":
        raise CommandError("; ".join(remarks))
    return [name for name in asked if PEERS[name].is_installed()], remarks


def _comparisons(
    workload: str,
    case: Mapping[str, NDArray[Any]],
    peers: Sequence[str],
    settings: Sequence[Setting],
    progress: "_Progress",
) -> list[tuple[str | None, list[Setting]]]:
    """Return what to compare a case with, in which settings; alone, if nothing can be compared."""
    found: list[tuple[str | None, list[Setting]]] = []
    for name in peers:
        fitting = [setting for setting in settings if _dtype_of(case, setting) in PEERS[name].dtypes]
        others = {_dtype_of(case, setting) for setting in settings if setting not in fitting}
        if others:
            progress.remark(
                f"{workload} is not compared with {name} in {', '.join(sorted(others))}: "
                f"all its floats must be {' or '.join(PEERS[name].dtypes)}"
            )
        if fitting:
            found.append((name, fitting))
    return found or [(None, list(settings))]


def _dtype_of(case: Mapping[str, NDArray[Any]], setting: Setting) -> str:
    if setting.dtype is not None:
        return setting.dtype
    names = {case[name].dtype.name for name in cases.FLOAT_INPUTS}
    return names.pop() if len(names) == 1 else "mixed types"


# Measuring


def _ours(case: Mapping[str, NDArray[Any]], setting: Setting) -> Call:
    *inputs, grad_output = (case[name] for name in cases.INPUTS)
    wrt, threads = setting.wrt, setting.threads
    return Call(
        enter=lambda: None,
        forward=lambda: msda.forward(*inputs, num_threads=threads),
        backward=lambda _: msda.backward(*inputs, grad_output, wrt=wrt, num_threads=threads),
        to_numpy=lambda result: result.astype(np.float64),
    )


class _Side:
    """One implementation in one setting, and the times of its runs: forward, backward."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.batches = (1, 1)  # calls that are timed together
        self.times: tuple[list[float], list[float]] = ([], [])

    def choose_batches(self) -> None:
        self.call.enter()
        forward, output = _batch(self.call.forward)
        backward, _ = _batch(lambda: self.call.backward(output))
        self.batches = (forward, backward)

    def time_forward(self) -> Any:
        self.call.enter()
        seconds, output = _timed(self.call.forward, self.batches[0])
        self.times[0].append(seconds)
        return output

    def time_backward(self, output: Any) -> None:
        self.call.enter()
        seconds, _ = _timed(lambda: self.call.backward(output), self.batches[1])
        self.times[1].append(seconds)


def _batch(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many calls to time together, and the result of one."""
    result = call()  # not counted: a first call may have more to do than others
    calls, start = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - start < _BATCH_SECONDS:
        result = call()
        calls += 1
    return calls, result


def _timed(call: Callable[[], Any], calls: int) -> tuple[float, Any]:
    """Return the seconds that a call takes, out of several timed together, and the last one's result."""
    time.sleep(_PAUSE_SECONDS)
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    return (time.perf_counter() - start) / calls, result


class _Pair:
    """Ours and a peer's in one setting; or ours alone."""

    def __init__(
        self,
        workload: str,
        case: Mapping[str, NDArray[Any]],
        against: str | None,
        setting: Setting,
        default_threads: int,
    ) -> None:
        self._workload, self._against, self._setting = workload, against, setting
        self._dtype = _dtype_of(case, setting)
        if setting.dtype is not None:
            case = cases.cast(case, cases.dtype_named(setting.dtype))
        ours = _ours(case, setting)
        try:
            output = ours.forward()
            forward_team = last_team()
            gradients = ours.backward(output)
            self._teams = (forward_team, last_team())
        except (TypeError, ValueError) as error:
            raise CommandError(f"{workload}: {error}") from None

        self.sides = [_Side(ours)]
        self._distances: dict[str, float] = {}
        with self._explained():
            if against is not None:
                theirs = PEERS[against].bind(case, setting.wrt, setting.threads or default_threads)
                theirs.enter()
                their_output = theirs.forward()
                their_gradients = theirs.backward(their_output)
                self.sides.append(_Side(theirs))
                self._compare((output, *gradients), (their_output, *their_gradients))
            for side in self.sides:
                side.choose_batches()

    def run(self) -> None:
        """Time each side once, in turn."""
        with self._explained():
            outputs = [side.time_forward() for side in self.sides]
            for side, output in zip(self.sides, outputs, strict=True):
                side.time_backward(output)

    def measurements(self, first: "_Pair") -> list[Measurement]:
        """Return what was measured; `first` is the pair in the first of the settings."""
        ours = self.sides[0].times
        theirs = self.sides[1].times if self._against is not None else ([], [])
        return [
            Measurement(
                workload=self._workload,
                dtype=self._dtype,
                setting=self._setting,
                forward=number == 0,
                team=self._teams[number],
                against=self._against,
                ours=ours[number],
                theirs=theirs[number],
                first=first.sides[0].times[number],
                distances={
                    name: distance
                    for name, distance in self._distances.items()
                    if (name == "output") == (number == 0)
                },
            )
            for number in range(2)
        ]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn whatever a peer raises into a failure of the command. Ours raises nothing after its first calls."""
        try:
            yield
        except (CommandError, MemoryError):
            raise
        except Exception as error:
            raise CommandError(f"{self._against} cannot run {self._workload}: {error}") from None

    def _compare(self, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
        """Note how far the results are apart, and raise if that is too far."""
        names = ["output", *(f"grad_{name}" for name in GRADIENTS if name in self._setting.wrt)]
        results = ([result for result in side if result is not None] for side in (ours, theirs))
        for name, our, their in zip(names, *results, strict=True):
            distance = _distance(*(side.call.to_numpy(x) for side, x in zip(self.sides, (our, their), strict=True)))
            if not distance <= TOLERANCES[name]:
                raise CommandError(
                    f"{self._workload}: {name} in {self._dtype} of {self._against} differs from ours by "
                    f"{distance:.2g} (relative L2; up to {TOLERANCES[name]:g} would do), so nothing was timed"
                )
            self._distances[name] = distance


def _distance(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Return the L2 norm of the difference, relative to that of ours."""
    with np.errstate(all="ignore"):
        difference, norm = float(np.linalg.norm(theirs - ours)), float(np.linalg.norm(ours))
    return difference if difference == 0 else difference / norm if norm else math.inf


def _measure(
    workload: str,
    case: Mapping[str, NDArray[Any]],
    against: str | None,
    settings: Sequence[Setting],
    default_threads: int,
    repeats: int,
    progress: "_Progress",
) -> list[Measurement]:
    """Measure one workload or case against one peer, with all settings taking turns."""
    doing = workload if against is None else f"{workload} against {against}"
    pairs = []
    for setting in settings:
        progress.begin(doing)
        pairs.append(_Pair(workload, case, against, setting, default_threads))
        progress.step()
    for _ in range(repeats):
        for pair in pairs:
            pair.run()
            progress.step()
    return [measurement for pair in pairs for measurement in pair.measurements(pairs[0])]


# What is shown


class Summary(NamedTuple):
    """The quartiles of some numbers."""

    low: float
    median: float
    high: float


def summary(numbers: Sequence[float]) -> Summary:
    """Return the quartiles of `numbers`."""
    return Summary(*np.percentile(numbers, (25, 50, 75)).tolist())


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide run by run."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
