"""The benchmark command. What it measures is not asserted, only that it measures what it says."""

import contextlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

import msda
from msda.cli import bench, cases, main, peers, workloads

DATA = Path(__file__).parent / "data"
ALL_RESULTS = ("output", "grad_value", "grad_sampling_locations", "grad_attention_weights")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One call at a time, one after the other."""
    monkeypatch.setattr(bench, "_BATCH_SECONDS", 1e-9)
    monkeypatch.setattr(bench, "_PAUSE_SECONDS", 0)


class Fake:
    """A peer that does what this library does, and keeps a diary."""

    def __init__(self, dtypes=("float16", "bfloat16", "float32", "float64")):
        self.diary = []
        self.changes = {}  # a result's name: how it comes out instead
        self.peer = peers.Peer(
            "numpy",
            ("numpy", "no-such-distribution"),
            "pip install fake==1 && fake build",
            tuple(dtypes),
            self.bind,
        )

    def bind(self, case, wrt, num_threads):
        *inputs, grad_output = (case[name] for name in cases.INPUTS)
        self.bound = case

        def changed(name, array):
            return self.changes.get(name, lambda same: same)(array)

        def forward():
            self.diary.append("their forward")
            self.output = changed("output", msda.reference.forward(*inputs))
            return self.output

        def backward(output):
            assert output is self.output
            self.diary.append("their backward")
            gradients = msda.reference.backward(*inputs, grad_output)._asdict()
            return [changed(f"grad_{name}", array) for name, array in gradients.items() if name in wrt]

        return peers.Call(
            enter=lambda: self.diary.append(f"{num_threads} threads"),
            forward=forward,
            backward=backward,
            to_numpy=lambda array: array.astype(np.float64),
        )


@pytest.fixture
def fake(monkeypatch):
    """The only peer there is, installed."""
    made = Fake()
    monkeypatch.setattr(bench, "PEERS", {"fake": made.peer})
    return made


@pytest.fixture
def two_peers(monkeypatch):
    made = {"one": Fake(), "two": Fake(dtypes=("float32", "float64"))}
    monkeypatch.setattr(bench, "PEERS", {name: each.peer for name, each in made.items()})
    return made


@pytest.fixture
def no_peers(monkeypatch):
    """Three peers, of which none is installed."""
    absent = Fake().peer._replace(module="no_such_module")
    table = {"one": absent, "two": absent, "three": absent._replace(install="pip install three")}
    monkeypatch.setattr(bench, "PEERS", table)


@pytest.fixture
def small_case(tmp_path):
    """A small case in a file."""
    path = tmp_path / "case.npz"
    with np.load(DATA / "rectangles.npz") as archive:
        np.savez(path, **{name: archive[name] for name in cases.INPUTS})
    return path


def run(capsys, *arguments):
    """Run `msda bench`, which must succeed; return what it prints."""
    assert main(["bench", *map(str, arguments)]) == 0
    return capsys.readouterr()


def run_json(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--json").out)


def error_line(capsys, *arguments):
    """Run `msda bench`; it must fail with one line, which is returned."""
    assert main(["bench", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("msda bench: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("msda bench: error: ").rstrip("\n")


def table(out):
    """The rows of the printed table, as dicts."""
    lines = out.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("workload"))
    names = re.split(r" {2,}", lines[start])
    begins = [lines[start].index(name) for name in names]
    rows = []
    for line in lines[start + 1 : lines.index("", start)]:
        cells = [line[a:b].rstrip() for a, b in zip(begins, [*begins[1:], None], strict=True)]
        rows.append(dict(zip(names, cells, strict=True)))
    return rows


NUMBER = r"\d[\d.]* \+-\d+%"


# Alone


def test_alone(capsys):
    captured = run(capsys, "small", "--against", "none", "--repeats", 2, "--threads", 2)
    assert captured.err == ""
    heading, _, *lines = captured.out.splitlines()
    assert heading == f"msda {msda.__version__} ({msda.runtime_info()['isa']}), at most 2 threads, float32"
    assert re.split(r" {2,}", lines[0]) == ["workload", "pass", "ours, ms", "ns/corner"]
    rows = table(captured.out)
    assert [(row["workload"], row["pass"]) for row in rows] == [("small", "forward"), ("small", "backward")]
    assert all(re.fullmatch(NUMBER, row["ours, ms"]) for row in rows)
    assert "the median of 2 runs in turn" in lines[-2] and "theirs" not in captured.out


def test_all_six_workloads_unless_some_are_named(capsys, monkeypatch):
    monkeypatch.setattr(
        workloads, "make", lambda name, make=workloads.make: made.append(name) or make("small")
    )
    made = []
    rows = table(run(capsys, "--against", "none", "--repeats", 1).out)
    assert made == list(workloads.WORKLOADS) == [row["workload"] for row in rows[::2]]
    made = []
    run(capsys, "bev", "small", "bev", "--against", "none", "--repeats", 1)
    assert made == ["bev", "small"]
    made = []
    run(capsys, "maps", "small", "--against", "none", "--repeats", 1)
    assert made == ["map_16", "map_32", "map_64", "map_128", "map_200", "map_400", "small"]


@pytest.mark.parametrize("name", workloads.GROUPS["unusual"] | workloads.GROUPS["maps"])
def test_further_workloads_are_what_they_are_called(name):
    workload = workloads.ALL[name]
    kind, _, number = name.partition("_")
    found = {
        "channels": workload.channels,
        "points": workload.num_points,
        "levels": len(workload.spatial_shapes),
    }
    if kind == "map":
        assert found == {"channels": 32, "points": 4, "levels": 1}
        assert workload.spatial_shapes == ((int(number), int(number)),)
    else:
        assert found == {"channels": 32, "points": 4, "levels": 3} | {kind: int(number)}


def test_every_workload_has_numbers_of_its_own():
    numbers = [workload.number for workload in workloads.ALL.values()]
    assert len(set(numbers)) == len(numbers)


def test_a_case(capsys, small_case):
    (forward, backward) = table(run(capsys, small_case, "--against", "none").out)
    assert forward["workload"] == backward["workload"] == str(small_case)


def test_settings_are_compared_with_the_first(capsys):
    document = run_json(
        capsys, "small", "--against", "none", "--threads", "1,2", "--dtype", "float32,float64", "--repeats", 3
    )
    found = [(entry["pass"], entry["dtype"], entry["threads"]) for entry in document["measurements"]]
    settings = [("float32", 1), ("float32", 2), ("float64", 1), ("float64", 2)]
    assert found == [(each, *setting) for each in ("forward", "backward") for setting in settings]
    for entry in document["measurements"]:
        first = document["measurements"][0 if entry["pass"] == "forward" else 4]
        expected = [a / b for a, b in zip(first["ours"]["runs"], entry["ours"]["runs"], strict=True)]
        assert entry["vs_first"]["runs"] == expected
        assert entry["team"] == min(entry["threads"], 2 if msda.runtime_info()["openmp"] else 1)
        assert entry["against"] is entry["theirs"] is entry["ratio"] is entry["differs_by"] is None


def test_columns_for_what_differs(capsys):
    arguments = ["small", "--against", "none", "--repeats", 1]
    rows = table(run(capsys, *arguments, "--threads", "1,2").out)
    assert list(rows[0]) == ["workload", "pass", "threads", "ours, ms", "ns/corner", "vs first"]
    assert [row["threads"] for row in rows] == ["1", "2", "1", "2"]
    assert rows[0]["vs first"] == rows[2]["vs first"] == "1.00 +-0%"
    rows = table(run(capsys, *arguments, "--dtype", "float64,float16").out)
    assert [row["dtype"] for row in rows] == ["float64", "float16"] * 2
    rows = table(run(capsys, *arguments, "--wrt", "value", "--wrt", "value,attention_weights").out)
    assert [row["wrt"] for row in rows] == ["", "", "value", "value,attention_weights"]
    heading, *_ = run(capsys, *arguments, "--wrt", "value", "--dtype", "float64").out.splitlines()
    assert heading.endswith(", float64, backward for value")


def test_settings_take_turns(capsys, monkeypatch):
    forward, asked = msda.forward, []

    def recorded(*args, num_threads):
        asked.append(num_threads)
        return forward(*args, num_threads=num_threads)

    monkeypatch.setattr(msda, "forward", recorded)
    run(capsys, "small", "--against", "none", "--threads", "1,2", "--repeats", 3)
    assert asked[-6:] == [1, 2] * 3
    asked.clear()
    run(capsys, "small", "--against", "none", "--repeats", 1)
    assert set(asked) == {None}


# Compared with a peer


def test_the_table(fake, capsys):
    captured = run(capsys, "small", "--repeats", 2)
    assert captured.err == ""
    rows = table(captured.out)
    assert list(rows[0])[2:] == [
        "ours, ms",
        "ns/corner",
        "against",
        "theirs, ms",
        "theirs / ours",
        "differs by",
    ]
    for row in rows:
        assert row["against"] == "fake"
        assert all(re.fullmatch(NUMBER, row[name]) for name in ("ours, ms", "theirs, ms", "theirs / ours"))
        assert row["differs by"] == "0.0e+00"
    assert "up to\n0.001 is taken for the same" in captured.out


def test_the_document(fake, capsys):
    fake.changes = {"grad_value": lambda array: array * np.float32(1 + 2.0**-13)}
    document = run_json(capsys, "small", "--threads", "1", "--repeats", 5)
    assert document["msda"] == msda.runtime_info()
    assert document["peers"] == {"fake": {"numpy": np.__version__, "no-such-distribution": None}}
    assert document["repeats"] == 5
    assert tuple(document["tolerances"]) == ALL_RESULTS
    forward, backward = document["measurements"]
    assert (forward["pass"], forward["wrt"]) == ("forward", None)
    assert (backward["pass"], backward["wrt"]) == ("backward", list(bench.GRADIENTS))
    assert tuple(forward["differs_by"]) == ALL_RESULTS[:1]
    assert tuple(backward["differs_by"]) == ALL_RESULTS[1:]
    assert backward["differs_by"]["grad_value"] == pytest.approx(2.0**-13, rel=1e-3)
    for entry in forward, backward:
        assert (entry["workload"], entry["dtype"], entry["threads"]) == ("small", "float32", 1)
        assert (entry["team"], entry["against"]) == (1, "fake")
        assert entry["corners"] == 4 * 100 * 4 * 2 * 4
        assert entry["ns_per_corner"] == entry["ours"]["median"] * 1e9 / entry["corners"]
        for name in ("ours", "theirs", "ratio", "vs_first"):
            runs = sorted(entry[name]["runs"])
            assert len(runs) == 5 and runs[0] > 0
            assert entry[name]["median"] == runs[2]
            assert entry[name]["quartiles"] == [runs[1], runs[3]]
        times = zip(entry["theirs"]["runs"], entry["ours"]["runs"], strict=True)
        assert entry["ratio"]["runs"] == [theirs / ours for theirs, ours in times]


def test_runs_alternate(fake, capsys, monkeypatch):
    def recorded(name, call):
        def record_and_call(*args, **kwargs):
            fake.diary.append(f"our {name}")
            return call(*args, **kwargs)

        return record_and_call

    monkeypatch.setattr(msda, "forward", recorded("forward", msda.forward))
    monkeypatch.setattr(msda, "backward", recorded("backward", msda.backward))
    run(capsys, "small", "--threads", "2", "--repeats", 3)
    one = ["our forward", "2 threads", "their forward", "our backward", "2 threads", "their backward"]
    assert fake.diary[-3 * len(one) :] == 3 * one
    # Before: the comparison, and one run that is not counted, for each.
    assert fake.diary[: -3 * len(one)] == [
        *("our forward", "our backward", "2 threads", "their forward", "their backward"),
        *("our forward", "our backward", "2 threads", "their forward", "their backward"),
    ]


def test_a_peer_gets_our_number_of_threads(fake, capsys, monkeypatch):
    monkeypatch.setenv("MSDA_NUM_THREADS", "1")
    run(capsys, "small", "--repeats", 1)
    assert {entry for entry in fake.diary if "threads" in entry} == {"1 threads"}
    fake.diary.clear()
    run(capsys, "small", "--repeats", 1, "--threads", "3,2")
    assert [entry for entry in fake.diary if "threads" in entry][-4:] == ["3 threads"] * 2 + ["2 threads"] * 2


def test_a_peer_gets_the_case_in_the_dtype(fake, capsys, small_case):
    run(capsys, small_case, "--repeats", 1, "--dtype", "float64", "--wrt", "attention_weights,value")
    assert {fake.bound[name].dtype.name for name in cases.FLOAT_INPUTS} == {"float64"}
    with np.load(small_case) as archive:
        assert all((fake.bound[name] == archive[name]).all() for name in cases.INPUTS)


def test_several_peers(two_peers, capsys):
    rows = table(run(capsys, "small", "--repeats", 1).out)
    assert [row["against"] for row in rows] == ["one", "one", "two", "two"]
    rows = table(run(capsys, "small", "--repeats", 1, "--against", "two").out)
    assert [row["against"] for row in rows] == ["two", "two"]
    assert "against" not in table(run(capsys, "small", "--repeats", 1, "--against", "none").out)[0]
    names = {
        entry["against"]
        for entry in run_json(capsys, "small", "--repeats", 1, "--against", "all")["measurements"]
    }
    assert names == {"one", "two"}


def test_dtypes_that_a_peer_does_not_have(two_peers, capsys):
    captured = run(capsys, "small", "--repeats", 1, "--dtype", "float32,float16")
    assert captured.err == (
        "msda bench: small is not compared with two in float16: all its floats must be float32 or float64\n"
    )
    rows = table(captured.out)
    assert [(row["against"], row["dtype"]) for row in rows] == [
        *(("one", "float32"), ("one", "float16")) * 2,
        *(("two", "float32"),) * 2,
    ]
    captured = run(capsys, "small", "--repeats", 1, "--dtype", "float16", "--against", "two")
    assert [row["against"] for row in table(captured.out)] == ["", ""]


def test_a_case_of_mixed_dtypes(fake, capsys, small_case):
    with np.load(small_case) as archive:
        case = dict(archive) | {"value": archive["value"].astype(np.float64)}
    np.savez(small_case, **case)
    captured = run(capsys, small_case, "--repeats", 1)
    assert "is not compared with fake in mixed types: all its floats must be float16 or " in captured.err
    assert [row["against"] for row in table(captured.out)] == ["", ""]
    rows = table(run(capsys, small_case, "--repeats", 1, "--dtype", "float32").out)
    assert [row["against"] for row in rows] == ["fake", "fake"]


# Results that do not agree


@pytest.mark.parametrize("name", ALL_RESULTS)
@pytest.mark.parametrize(
    "change",
    [
        lambda array: array * np.float32(1.1),
        lambda array: np.flip(array, -1),
        lambda array: np.zeros_like(array),
        lambda array: np.where(np.arange(array.size).reshape(array.shape) == 7, np.nan, array),
        lambda array: array[..., :1],
    ],
)
def test_a_wrong_result_is_found(name, change, fake, capsys, small_case, monkeypatch):
    def timed(call, calls):
        raise AssertionError("timed")

    monkeypatch.setattr(bench, "_timed", timed)
    fake.changes = {name: change}
    message = error_line(capsys, small_case)
    assert message.startswith(f"{small_case}: {name} in float32 of fake differs from ours by ")
    assert message.endswith(", so nothing was timed")


def test_only_the_gradients_asked_for_are_compared(fake, capsys, small_case):
    fake.changes = {"grad_value": np.zeros_like}
    entry = run_json(capsys, small_case, "--wrt", "attention_weights,sampling_locations", "--repeats", 1)
    assert list(entry["measurements"][1]["differs_by"]) == [
        "grad_sampling_locations",
        "grad_attention_weights",
    ]
    fake.changes = {"grad_sampling_locations": np.zeros_like}
    assert "grad_sampling_locations" in error_line(capsys, small_case, "--wrt", "sampling_locations")


def test_rounding_is_no_disagreement(fake, capsys, small_case):
    fake.changes = dict.fromkeys(ALL_RESULTS, lambda array: array * np.float32(1 + 1e-4))
    distances = run_json(capsys, small_case, "--repeats", 1)["measurements"][1]["differs_by"]
    assert all(distance == pytest.approx(1e-4, rel=0.01) for distance in distances.values())


def test_distance():
    ours = np.array([3.0, 4.0])
    assert bench._distance(ours, ours) == 0
    assert bench._distance(ours, np.array([3.0, 4.5])) == 0.1
    assert bench._distance(np.zeros(2), np.zeros(2)) == 0
    assert bench._distance(np.zeros(2), ours) == math.inf
    assert math.isnan(bench._distance(ours, np.array([3.0, np.nan])))


# Peers that are not there, or fail


def test_missing_peers_are_named(no_peers, capsys):
    command = "pip install fake==1 && fake build"
    captured = run(capsys, "small", "--repeats", 1)
    assert captured.err == (
        f"msda bench: one and two are not installed; to install: {command}\n"
        "msda bench: three is not installed; to install: pip install three\n"
    )
    assert list(table(captured.out)[0]) == ["workload", "pass", "ours, ms", "ns/corner"]
    assert run(capsys, "small", "--repeats", 1, "--against", "none").err == ""
    assert error_line(capsys, "small", "--against", "two") == f"two is not installed; to install: {command}"
    assert error_line(capsys, "--against", "all") == captured.err.replace("msda bench: ", "").replace(
        "\n", "; "
    ).removesuffix("; ")


@pytest.mark.parametrize(
    "error", [RuntimeError("no\nsuch shape"), ImportError("no such\nshape"), OSError("no such shape")]
)
def test_a_peer_that_fails(error, fake, capsys):
    def fails(array):
        raise error

    fake.changes = {"output": fails}
    assert error_line(capsys, "small") == f"fake cannot run small: {' '.join(str(error).split())}"


def test_a_peer_without_memory(fake, capsys):
    def fails(array):
        raise MemoryError

    fake.changes = {"grad_value": fails}
    assert error_line(capsys, "small") == "not enough memory"


def test_an_interruption(fake, capsys):
    def interrupted(array):
        raise KeyboardInterrupt

    fake.changes = {"grad_value": interrupted}
    assert main(["bench", "small"]) == 130


# Wrong command lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "argument --threads: expected an integer of at least 1, got '0'"),
        (["--threads", "1,,2"], "argument --threads: expected an integer of at least 1, got ''"),
        (["--threads", "1.5"], "argument --threads: expected an integer of at least 1, got '1.5'"),
        (["--repeats", "0"], "argument --repeats: expected an integer of at least 1, got '0'"),
        (["--dtype", "float32,int8"], "argument --dtype: invalid choice: 'int8' (choose from "),
        (["--wrt", ""], "argument --wrt: invalid choice: ''"),
        (["--wrt", "value,grad_output"], "argument --wrt: invalid choice: 'grad_output'"),
        (
            ["--against", "fake"],
            "argument --against: invalid choice: 'fake' (choose from torch-ms-deform-attn, ",
        ),
        (["--against", "all,grid_sample"], "argument --against: invalid choice: 'all'"),
    ],
)
def test_a_wrong_command_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_run(capsys, tmp_path, small_case):
    assert error_line(capsys, "encodr").startswith("'encodr' is neither a workload (unusual, maps, encoder, ")
    path = tmp_path / "none.npz"
    assert error_line(capsys, "small", path) == f"cannot read {path}: No such file or directory"
    assert error_line(capsys, "./none") == "cannot read ./none: No such file or directory"
    with np.load(small_case) as archive:
        case = dict(archive) | {"value": archive["value"][:, :-1]}
    np.savez(small_case, **case)
    with pytest.raises(ValueError) as raised:
        msda.backward(**case)
    assert error_line(capsys, small_case, "--against", "none") == f"{small_case}: {raised.value}"


def test_an_environment_without_a_number_of_threads(capsys, monkeypatch):
    monkeypatch.setenv("MSDA_NUM_THREADS", "many")
    assert "MSDA_NUM_THREADS" in error_line(capsys, "small", "--against", "none")


def test_bfloat16_without_ml_dtypes(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    message = error_line(capsys, "small", "--dtype", "float32,bfloat16", "--against", "none")
    assert message == "bfloat16 needs the package ml_dtypes: pip install ml_dtypes"


# Numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1.0], "1.00 +-0%"),
        ([0.00123456], "0.00123 +-0%"),
        ([90, 100, 110], "100 +-5%"),
        ([1234567.0], "1234567 +-0%"),
        ([9.996], "10.00 +-0%"),
        ([2, 3, 1, 5, 4], "3.00 +-33%"),
    ],
)
def test_spread(numbers, text):
    assert bench._spread(numbers) == text


def test_batches(monkeypatch):
    now, durations = [0.0], iter([0.1, 0.002, 0.004] + [0.002] * 100)

    def call():
        now[0] += next(durations)

    monkeypatch.setattr(bench, "_BATCH_SECONDS", 0.02)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert bench._batch(call)[0] == 10  # one that was held up does not make it a long one
    before = now[0]
    assert bench._timed(call, 10)[0] == pytest.approx(0.002)
    assert now[0] - before == pytest.approx(0.02)
    durations = iter([0.2])
    assert bench._batch(call)[0] == 1


def test_all_sides_are_timed_over_as_many_calls(two_peers, capsys, monkeypatch):
    needed, timed = iter(range(1, 100)), []

    def batch(call):
        return next(needed), call()

    def record(call, calls):
        timed.append(calls)
        return 1e-3, call()

    monkeypatch.setattr(bench, "_batch", batch)
    monkeypatch.setattr(bench, "_timed", record)
    run(capsys, "small", "--against", "one", "--threads", "1,2", "--repeats", 1)
    assert timed == [7, 7, 8, 8] * 2


def test_a_case_without_queries(capsys, small_case):
    with np.load(small_case) as archive:
        case = {name: archive[name] for name in cases.INPUTS}
    queries = ("sampling_locations", "attention_weights", "grad_output")
    np.savez(small_case, **case | {name: case[name][:, :0] for name in queries})
    rows = table(run(capsys, small_case, "--against", "none", "--repeats", 1).out)
    assert [row["ns/corner"] for row in rows] == ["0", "0"]


# The bar


class Bar:
    """What is used of tqdm."""

    def __init__(self, total, file, leave, unit):
        self.total, self.file, self.leave, self.done, self.described = total, file, leave, 0, []
        self.closed = False
        Bar.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.closed = True

    def set_description(self, text):
        self.described.append(text)

    def update(self, steps):
        assert not self.closed
        self.done += steps

    def external_write_mode(self, file):
        return contextlib.nullcontext()


@pytest.fixture
def bars(monkeypatch):
    Bar.made = []
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    return Bar.made


@pytest.fixture
def terminal(monkeypatch):
    """To be called in the test: pytest puts its stream in place after the fixtures have run."""
    return lambda: monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_a_bar_on_a_terminal(terminal, bars, two_peers, capsys):
    terminal()
    captured = run(capsys, "small", "--threads", "1,2", "--repeats", 3)
    (bar,) = bars
    assert bar.file is sys.stderr and not bar.leave
    assert bar.done == bar.total == 2 * 2 * (1 + 3)
    assert list(dict.fromkeys(bar.described)) == ["small against one", "small against two"]
    assert bar.closed and captured.err == ""
    assert len(table(captured.out)) == 8


def test_the_bar_comes_to_its_end_when_a_peer_is_left_out(terminal, bars, two_peers, capsys):
    terminal()
    run(capsys, "small", "--dtype", "float16,float32", "--repeats", 1)
    assert bars[0].done == bars[0].total


def test_the_bar_goes_when_something_fails(terminal, bars, fake, capsys):
    terminal()
    fake.changes = {"output": np.zeros_like}
    error_line(capsys, "small")
    assert bars[0].closed


def test_no_bar_elsewhere(bars, fake, capsys):
    run(capsys, "small", "--repeats", 1)
    run_json(capsys, "small", "--repeats", 1)
    assert bars == []


def test_no_bar_without_tqdm(terminal, monkeypatch, capsys):
    terminal()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    captured = run(capsys, "small", "--repeats", 1, "--against", "none")
    assert captured.err == ""
    assert len(table(captured.out)) == 2


@pytest.mark.skipif(not importlib.util.find_spec("tqdm"), reason="needs tqdm")
def test_the_real_bar(terminal, fake, capsys):
    terminal()
    captured = run(capsys, "small", "--repeats", 2)
    assert "small against fake" in captured.err
    assert "3/3" in captured.err
    assert len(table(captured.out)) == 2


# PyTorch


def command(*arguments, python_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(python_path), os.environ.get("PYTHONPATH", "")])
    }
    return subprocess.run(
        [sys.executable, "-m", "msda", "bench", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_torch_is_imported_for_a_peer_alone(tmp_path):
    for name in ("torch", "torch_ms_deform_attn"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('imported')\n")
    done = command("small", "--against", "none", "--repeats", "1", python_path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = command("small", "--repeats", "1", python_path=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "msda bench: error: torch-ms-deform-attn cannot run small: imported\n"


@pytest.mark.skipif(not importlib.util.find_spec("torch_ms_deform_attn"), reason="needs torch-ms-deform-attn")
def test_the_real_peers(tmp_path):
    """In a process of their own: PyTorch changes the one that it is imported into."""
    arguments = [
        "small",
        str(DATA / "decoder.npz"),
        "--repeats",
        "1",
        "--json",
        "--threads",
        "1,2",
        "--against",
        "all",
    ]
    done = command(*arguments, "--dtype", "float16,float32,float64", python_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not compared with grid_sample in float16") == 2
    document = json.loads(done.stdout)
    assert set(document["peers"]["grid_sample"]) == {"torch", "torch-ms-deform-attn"}
    assert len(document["measurements"]) == 2 * 2 * 2 * (3 + 2)
    for entry in document["measurements"]:
        if entry["dtype"] == "float64":
            assert max(entry["differs_by"].values()) < 1e-13
