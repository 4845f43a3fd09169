"""``msda bench``: how long calls take, in alternation with other implementations.

What is compared is timed in pairs: ours, theirs, ours, theirs, and so on, in one process. What slows the
machine down for a while slows both, so the median of the pairs' ratios says more than a ratio of medians.
Several settings of ours (threads, dtypes, gradients) take turns in the same way.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

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

# Short calls are timed several at a time: as many on all sides, and so many that the fastest takes this long.
_BATCH_SECONDS = 0.02
# Before each timing. The threads of the call before go on waiting for work, on cores that the next one needs,
# and fall asleep after some milliseconds.
_PAUSE_SECONDS = 0.02

_DESCRIPTION = f"""\
Time forward and backward passes, in alternation with the other implementations that are installed. Before, their
results are compared with ours. When nothing is named, these workloads are run: {", ".join(workloads.WORKLOADS)}.
{" ".join(f"The name {name} stands for {', '.join(group)}." for name, group in workloads.GROUPS.items())}"""


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
    team: int  # threads that ran in ours
    corners: int  # pixels that are read by all samples together
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
    given_cases = _given_cases(args.names or list(workloads.WORKLOADS))
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

    table = _Table(list(given_cases), peers, settings, default_threads, args.repeats)
    found: list[Measurement] = []
    pairs_each = max(1, len(peers)) * len(settings)
    with _progress(len(given_cases) * pairs_each * (1 + args.repeats)) as progress:
        for remark in remarks:
            progress.remark(remark)
        if not args.json:
            progress.print(table.heading())
        for workload, given in given_cases.items():
            case = workloads.make(workload) if given is None else given
            comparisons = _comparisons(workload, case, peers, settings, progress)
            left_out = pairs_each - sum(len(fitting) for _, fitting in comparisons)
            progress.step(left_out * (1 + args.repeats))
            for against, fitting in comparisons:
                measured = _measure(workload, case, against, fitting, default_threads, args.repeats, progress)
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


def _given_cases(names: Sequence[str]) -> dict[str, dict[str, NDArray[Any]] | None]:
    """Return the cases among `names`, which are read now, and None for each workload, which is made later."""
    given: dict[str, dict[str, NDArray[Any]] | None] = {}
    for name in names:
        if name in workloads.GROUPS:
            given |= dict.fromkeys(workloads.GROUPS[name])
        elif name in workloads.ALL:
            given[name] = None
        elif name.endswith(".npz") or os.path.dirname(name) or os.path.exists(name):
            given[shown(name)] = cases.read(name)
        else:
            known = ", ".join([*workloads.GROUPS, *workloads.ALL])
            raise CommandError(f"{name!r} is neither a workload ({known}) nor a file")
    return given


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
    value, shapes, starts, locations, weights, grad_output = (case[name] for name in cases.INPUTS)
    wrt, threads = setting.wrt, setting.threads
    return Call(
        enter=lambda: None,
        forward=lambda: msda.forward(value, shapes, starts, locations, weights, num_threads=threads),
        backward=lambda _: msda.backward(
            value, shapes, starts, locations, weights, grad_output, wrt=wrt, num_threads=threads
        ),
        to_numpy=lambda result: result.astype(np.float64),
    )


class _Side:
    """One implementation in one setting, and the times of its runs: forward, backward."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.times: tuple[list[float], list[float]] = ([], [])
        self.teams = (1, 1)  # threads that ran, if it is ours

    def compute(self) -> list[NDArray[Any]]:
        """Return the output and the gradients."""
        self.call.enter()
        output = self.call.forward()
        forward_team = last_team() or 1
        gradients = self.call.backward(output)
        self.teams = (forward_team, last_team() or 1)
        return [self.call.to_numpy(result) for result in (output, *gradients) if result is not None]

    def batches(self) -> tuple[int, int]:
        """Return how many calls of each pass must be timed together."""
        self.call.enter()
        forward, output = _batch(self.call.forward)
        backward, _ = _batch(lambda: self.call.backward(output))
        return forward, backward

    def time_forward(self, calls: int) -> Any:
        """Time some calls, and return the last output."""
        self.call.enter()
        seconds, output = _timed(self.call.forward, calls)
        self.times[0].append(seconds)
        return output

    def time_backward(self, output: Any, calls: int) -> None:
        """Time some calls for an output of the forward pass."""
        self.call.enter()
        seconds, _ = _timed(lambda: self.call.backward(output), calls)
        self.times[1].append(seconds)


def _batch(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many calls must be timed together, and the result of one.

    The shortest of some calls decides, as others may have been held up.
    """
    time.sleep(_PAUSE_SECONDS)
    times: list[float] = []
    while sum(times) < _BATCH_SECONDS or (len(times) < 10 and sum(times) < 10 * _BATCH_SECONDS):
        result = None  # what was returned before is gone, as in `_timed`
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return math.ceil(_BATCH_SECONDS / min(times)), result


def _timed(call: Callable[[], Any], calls: int) -> tuple[float, Any]:
    """Return the seconds that a call takes, out of several timed together, and the last one's result."""
    time.sleep(_PAUSE_SECONDS)
    start = time.perf_counter()
    for _ in range(calls - 1):
        call()  # nobody keeps the result, so that the next one may take its memory
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
        self._corners = 4 * case["attention_weights"].size
        if setting.dtype is not None:
            case = cases.cast(case, cases.dtype_named(setting.dtype))
        ours = _Side(_ours(case, setting))
        try:
            results = ours.compute()
        except (TypeError, ValueError) as error:
            raise CommandError(f"{workload}: {error}") from None
        self._sides = [ours]
        self._distances: dict[str, float] = {}
        with self._explained():
            if against is not None:
                theirs = _Side(PEERS[against].bind(case, setting.wrt, setting.threads or default_threads))
                self._compare(results, theirs.compute())
                self._sides.append(theirs)

    def batches(self) -> tuple[int, int]:
        """Return how many calls of each pass must be timed together; this is a run that is not counted."""
        with self._explained():
            forward, backward = zip(*(side.batches() for side in self._sides), strict=True)
        return max(forward), max(backward)

    def run(self, forward_calls: int, backward_calls: int) -> None:
        """Time each side once, in turn."""
        with self._explained():
            outputs = [side.time_forward(forward_calls) for side in self._sides]
            for side, output in zip(self._sides, outputs, strict=True):
                side.time_backward(output, backward_calls)

    def measurements(self, first: "_Pair") -> list[Measurement]:
        """Return what was measured; `first` is the pair in the first of the settings."""
        ours = self._sides[0].times
        theirs = self._sides[1].times if self._against is not None else ([], [])
        return [
            Measurement(
                workload=self._workload,
                dtype=self._dtype,
                setting=self._setting,
                forward=number == 0,
                team=self._sides[0].teams[number],
                corners=self._corners,
                against=self._against,
                ours=ours[number],
                theirs=theirs[number],
                first=first._sides[0].times[number],
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

    def _compare(self, ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> None:
        """Note how far the results are apart, and raise if that is too far."""
        names = ["output", *(f"grad_{name}" for name in GRADIENTS if name in self._setting.wrt)]
        for name, our, their in zip(names, ours, theirs, strict=True):
            distance = _distance(our, their)
            if not distance <= TOLERANCES[name]:
                raise CommandError(
                    f"{self._workload}: {name} in {self._dtype} of {self._against} differs from ours by "
                    f"{distance:.2g} (relative L2; up to {TOLERANCES[name]:g} would do), so nothing was timed"
                )
            self._distances[name] = distance


def _distance(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Return the L2 norm of the difference, relative to that of ours."""
    if ours.shape != theirs.shape:
        return math.inf
    # np.linalg.norm would start threads of a BLAS, which keep a core busy for a while after it.
    with np.errstate(all="ignore"):
        difference, norm = (math.sqrt(np.square(x).sum()) for x in (theirs - ours, ours))
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
    forward_calls = backward_calls = 1
    for setting in settings:
        progress.begin(doing)
        pair = _Pair(workload, case, against, setting, default_threads)
        forward, backward = pair.batches()
        forward_calls, backward_calls = max(forward, forward_calls), max(backward, backward_calls)
        pairs.append(pair)
        progress.step()
    for _ in range(repeats):
        for pair in pairs:
            pair.run(forward_calls, backward_calls)
            progress.step()
    by_pair = (pair.measurements(pairs[0]) for pair in pairs)
    return [measurement for one_pass in zip(*by_pair, strict=True) for measurement in one_pass]


# What is shown


def _quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = np.percentile(numbers, (25, 50, 75)).tolist()
    return low, median, high


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide run by run."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


class _Table:
    """Measurements as lines of text. A column that would say the same in each of them is left out."""

    def __init__(
        self,
        names: Sequence[str],
        peers: Sequence[str],
        settings: Sequence[Setting],
        default_threads: int,
        repeats: int,
    ) -> None:
        self._default_threads = default_threads
        self._repeats = repeats
        self._settings = settings
        self._dtype = (
            "float32" if set(names) <= set(workloads.ALL) else "float32, if a case does not say otherwise"
        )
        self._compares = bool(peers)
        widest: dict[str, Sequence[str]] = {"workload": names, "pass": ["backward"]}
        if len({setting.wrt for setting in settings}) > 1:
            widest["wrt"] = [",".join(setting.wrt) for setting in settings]
        if len({setting.dtype for setting in settings}) > 1:
            widest["dtype"] = FLOAT_NAMES
        if len({setting.threads for setting in settings}) > 1:
            widest["threads"] = []
        widest["ours, ms"] = ["0.00123 +-123%"]
        widest["ns/corner"] = []
        if len(settings) > 1:
            widest["vs first"] = ["0.123 +-123%"]
        if peers:
            widest |= {
                "against": peers,
                "theirs, ms": ["0.00123 +-123%"],
                "theirs / ours": [],
                "differs by": [],
            }
        self._widths = {name: max(map(len, [name, *cells])) for name, cells in widest.items()}

    def heading(self) -> str:
        """Return what comes before the rows."""
        info = msda.runtime_info()
        first = self._settings[0]
        said = [f"msda {info['version']} ({info['isa']})"]
        if "threads" not in self._widths:
            said.append(f"at most {_counted(first.threads or self._default_threads, 'thread')}")
        if "dtype" not in self._widths:
            said.append(first.dtype or self._dtype)
        if "wrt" not in self._widths and first.wrt != GRADIENTS:
            said.append(f"backward for {','.join(first.wrt)}")
        return f"{', '.join(said)}\n\n{self._line({name: name for name in self._widths})}"

    def rows(self, measurements: Sequence[Measurement]) -> str:
        """Return a line for each measurement."""
        return "\n".join(self._line(self._cells(measurement)) for measurement in measurements)

    def notes(self) -> str:
        """Return what comes after the rows."""
        notes = [
            f"Times are of one call: the median of {_counted(self._repeats, 'run')} in turn, and half the distance "
            "between the quartiles.",
            "ns/corner: our time for each of the four corners of a sample, on each of the threads that ran.",
        ]
        if len(self._settings) > 1:
            notes.append("vs first: the time in the first setting divided by that in this one, run by run.")
        if self._compares:
            notes += [
                "theirs / ours: the median of the ratios run by run; above 1, ours is the faster.",
                "differs by: the relative L2 distance of their results from ours, the largest of the pass; up to",
                f"{TOLERANCES['output']:g} is taken for the same, for grad_sampling_locations up to "
                f"{TOLERANCES['grad_sampling_locations']:g}.",
            ]
        return "\n" + "\n".join(notes)

    def _cells(self, measurement: Measurement) -> dict[str, str]:
        cells = {
            "workload": measurement.workload,
            "pass": "forward" if measurement.forward else "backward",
            "wrt": "" if measurement.forward else ",".join(measurement.setting.wrt),
            "dtype": measurement.dtype,
            "threads": str(measurement.setting.threads or self._default_threads),
            "ours, ms": _spread(measurement.ours, 1e3),
            "ns/corner": _three_digits(_nanoseconds(measurement)),
            "vs first": _spread(_ratios(measurement.first, measurement.ours)),
        }
        if measurement.against is not None:
            cells |= {
                "against": measurement.against,
                "theirs, ms": _spread(measurement.theirs, 1e3),
                "theirs / ours": _spread(_ratios(measurement.theirs, measurement.ours)),
                "differs by": f"{max(measurement.distances.values()):.1e}",
            }
        return cells

    def _line(self, cells: Mapping[str, str]) -> str:
        return "  ".join(f"{cells.get(name, ''):<{width}}" for name, width in self._widths.items()).rstrip()


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _spread(numbers: Sequence[float], unit: float = 1.0) -> str:
    """Return the median, and half the distance between the quartiles in per cent of it."""
    low, median, high = _quartiles(numbers)
    return f"{_three_digits(median * unit)} +-{(high - low) / 2 / median:.0%}"


def _three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}" if number > 0 else "0"


def _nanoseconds(measurement: Measurement) -> float:
    """Return what a corner costs, on each thread; 0 if there is none."""
    if measurement.corners == 0:
        return 0.0
    return _quartiles(measurement.ours)[1] * 1e9 * measurement.team / measurement.corners


def _document(
    measurements: Sequence[Measurement], peers: Sequence[str], default_threads: int, repeats: int
) -> dict[str, Any]:
    """Return all there is to say, for machines."""
    return {
        "msda": msda.runtime_info(),
        "peers": {name: PEERS[name].versions() for name in peers},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "repeats": repeats,
        "tolerances": TOLERANCES,
        "measurements": [_entry(measurement, default_threads) for measurement in measurements],
    }


def _entry(measurement: Measurement, default_threads: int) -> dict[str, Any]:
    compared = measurement.against is not None
    return {
        "workload": measurement.workload,
        "pass": "forward" if measurement.forward else "backward",
        "wrt": None if measurement.forward else measurement.setting.wrt,
        "dtype": measurement.dtype,
        "threads": measurement.setting.threads or default_threads,
        "team": measurement.team,
        "corners": measurement.corners,
        "ns_per_corner": _nanoseconds(measurement),
        "ours": _summary(measurement.ours),
        "vs_first": _summary(_ratios(measurement.first, measurement.ours)),
        "against": measurement.against,
        "theirs": _summary(measurement.theirs) if compared else None,
        "ratio": _summary(_ratios(measurement.theirs, measurement.ours)) if compared else None,
        "differs_by": measurement.distances if compared else None,
    }


def _summary(numbers: Sequence[float]) -> dict[str, Any]:
    low, median, high = _quartiles(numbers)
    return {"median": median, "quartiles": [low, high], "runs": numbers}


class _Progress:
    """A bar on standard error, where that is a terminal and tqdm is there; else no bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def begin(self, doing: str) -> None:
        """Say what the next steps are about."""
        if self._bar is not None:
            self._bar.set_description(doing)

    def step(self, steps: int = 1) -> None:
        """Move on."""
        if self._bar is not None:
            self._bar.update(steps)

    def print(self, text: str) -> None:
        """Print to standard output, above the bar."""
        self._write(text, sys.stdout)

    def remark(self, text: str) -> None:
        """Print a line to standard error, above the bar."""
        self._write(f"msda bench: {one_line(text)}", sys.stderr)

    def _write(self, text: str, file: TextIO) -> None:
        with contextlib.nullcontext() if self._bar is None else self._bar.external_write_mode(file):
            print(text, file=file, flush=True)


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[_Progress]:
    tqdm = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm").tqdm
    if tqdm is None:
        yield _Progress(None)
    else:
        with tqdm(total=steps, file=sys.stderr, leave=False, unit="run") as bar:
            yield _Progress(bar)
