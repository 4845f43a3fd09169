"""Tests of msda.aclnn, the operator's two-phase interface.

What is accepted and what refused stands in the tables of docs/limits.md, which are read here. Each row names
its test: an entry of `PHASE_1` or `PHASE_2` below, or a function.

The environment variable MSDA_EXAMPLES says how many random calls are tried. Without it, they are always the same.
"""

import array
import contextlib
import ctypes
import io
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import cases
import hostile
import msda
from compare import assert_same, dtype_of, random_levels, random_problem
from msda import aclnn, reference, threads
from msda.aclnn import AclnnStatus, aclGetRecentErrMsg

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"

phase_1 = aclnn.aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize
phase_2 = aclnn.aclnnMultiScaleDeformableAttentionGrad

INPUTS = ("value", "spatialShape", "levelStartIndex", "location", "attnWeight", "gradOutput")
INPUT_OF = {"gradValue": "value", "gradLocation": "location", "gradAttnWeight": "attnWeight"}
OUTPUTS = tuple(INPUT_OF)
LEVELS = INPUTS[1:3]
FLOATS = (INPUTS[0], *INPUTS[3:])

GARBAGE = 0xA5

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
needs_openmp = pytest.mark.skipif(not threads._system.openmp(), reason="built without OpenMP")


# Calls: dicts of the nine arguments of phase 1


def garbage(shape, dtype):
    return np.full((*shape, np.dtype(dtype).itemsize), GARBAGE, np.uint8).view(dtype)[..., 0]


def call_of(problem, *output_dtypes):
    """Make a call of the arguments of msda.backward. Outputs have the dtypes of their inputs, or these."""
    call = dict(zip(INPUTS, problem, strict=True))
    if call["levelStartIndex"] is None:
        areas = call["spatialShape"].prod(axis=1)
        call["levelStartIndex"] = np.cumsum(areas) - areas
    dtypes = output_dtypes or [call[like].dtype for like in INPUT_OF.values()]
    for (name, like), dtype in zip(INPUT_OF.items(), dtypes, strict=True):
        call[name] = garbage(call[like].shape, dtype)
    return call


def prepared(call):
    """Run phase 1, which must succeed."""
    status, workspace_size, executor = phase_1(**call)
    assert status == 0, aclGetRecentErrMsg()
    assert type(status) is AclnnStatus and type(workspace_size) is int
    assert type(executor) is aclnn.aclOpExecutor
    return workspace_size, executor


def run(workspace_size, executor):
    """Run phase 2, which must succeed, in a workspace that holds nothing useful."""
    workspace = bytearray([GARBAGE]) * workspace_size
    status = phase_2(workspace, workspace_size, executor, None)
    assert status == 0, aclGetRecentErrMsg()
    assert type(status) is AclnnStatus


def results(call):
    return {name: call[name] for name in OUTPUTS}


def computed(call):
    """Run both phases and give the outputs."""
    run(*prepared(call))
    return results(call)


def backward(call, out):
    return dict(zip(OUTPUTS, msda.backward(*(call[name] for name in INPUTS), out=out), strict=True))


def expected(call):
    """Give what msda.backward puts into outputs of the same dtypes."""
    return backward(call, tuple(np.empty(call[name].shape, call[name].dtype) for name in OUTPUTS))


def assert_right(call):
    assert_same(computed(call), expected(call))


def contents(call, names=INPUTS + OUTPUTS):
    return {
        name: call[name].tobytes() if isinstance(call[name], np.ndarray) else repr(call[name])
        for name in names
    }


def assert_refused(result, status, *fragments):
    """Assert that a phase gave this status, with a message that has all the fragments in it."""
    if isinstance(result, tuple):
        assert result[1:] == (0, None)
        result = result[0]
    assert result == status and type(result) is AclnnStatus
    for fragment in fragments:
        assert fragment in aclGetRecentErrMsg()


class Sketch:
    """A call before its arrays are made: right, until it is edited."""

    def __init__(self, *, bs=2, heads=2, channels=8, queries=5, levels=2, points=3, level=(2, 3)):
        area = level[0] * level[1]
        samples = (bs, queries, heads, levels, points)
        shapes = {
            "value": (bs, levels * area, heads, channels),
            "spatialShape": (levels, 2),
            "levelStartIndex": (levels,),
            "location": (*samples, 2),
            "attnWeight": samples,
            "gradOutput": (bs, queries, heads * channels),
        }
        shapes |= {name: shapes[like] for name, like in INPUT_OF.items()}
        self.shapes = {name: list(shape) for name, shape in shapes.items()}
        self.dtypes = {name: np.dtype("i4" if name in LEVELS else "f4") for name in shapes}
        self.levels = {
            "spatialShape": np.full((levels, 2), level),
            "levelStartIndex": area * np.arange(levels),
        }
        self.changes = []  # of the call that was made

    def call(self, rng=None):
        """Make the arrays, of random numbers or of zeros."""
        call = {}
        for name, shape in self.shapes.items():
            dtype = self.dtypes[name]
            call[name] = np.zeros(shape, dtype)
            if name in LEVELS:
                if call[name].shape == self.levels[name].shape:
                    call[name][...] = self.levels[name]
            elif rng is not None:
                call[name][...] = rng.uniform(-0.2, 1.2, shape).astype(dtype)
        for change in self.changes:
            change(call)
        return call


# Rows about phase 1


class Case(NamedTuple):
    """One call of a row: the sizes of its sketch, an edit of the sketch, and what the message has in it."""

    sizes: dict[str, Any]
    edit: Any
    fragments: tuple[str, ...]


def sketched(*of_cases):
    """Sketch one case, or several at once, of which the first has the last word."""
    sketch = Sketch(**{key: size for case in reversed(of_cases) for key, size in case.sizes.items()})
    for case in reversed(of_cases):
        case.edit(sketch)
    return sketch


def sized(*fragments, **sizes):
    """Sizes that agree with each other."""
    return Case(sizes, lambda sketch: None, fragments)


def dtyped(name, dtype):
    fragments = (f"{name} must be a", f"got dtype {np.dtype(dtype)}")
    return Case({}, lambda sketch: sketch.dtypes.update({name: np.dtype(dtype)}), fragments)


def longer(name, axis, by, *fragments):
    """One axis of one array longer, or shorter."""

    def edit(sketch):
        sketch.shapes[name][axis] += by

    return Case({}, edit, (f"{name} has shape (", *fragments))


def ranked(name, axes):
    """One axis more, or one less, at the end."""

    def edit(sketch):
        sketch.shapes[name] = sketch.shapes[name] + [1] if axes > 0 else sketch.shapes[name][:axes]

    return Case({}, edit, (f"{name} must have ", "got shape ("))


def numbered(name, index, number, *fragments):
    """Another number in spatialShape or levelStartIndex."""

    def edit(sketch):
        sketch.dtypes[name] = np.dtype("i8")
        sketch.levels[name] = sketch.levels[name].astype("i8")
        sketch.levels[name][index] = number

    return Case({}, edit, fragments)


def changed(change, *fragments, **sizes):
    """A change of the call that was made."""
    return Case(sizes, lambda sketch: sketch.changes.append(change), fragments)


def replaced(name, view, *fragments):
    """Something else in the place of an array, made from it."""
    return changed(lambda call: call.update({name: view(call[name])}), *fragments)


def cast(*dtypes):
    """The float arrays of these dtypes, in turn."""

    def change(call):
        for k, name in enumerate(FLOATS + OUTPUTS):
            call[name] = call[name].astype(dtypes[k % len(dtypes)])

    return changed(change)


def overlapping(name, other):
    """The last byte of an array is the first byte of an output."""

    def change(call):
        first, second = call[other], call[name]
        memory = np.zeros(first.nbytes + second.nbytes - 1, np.uint8)
        call[other] = memory[: first.nbytes].view(first.dtype).reshape(first.shape)
        call[other][...] = first
        call[name] = memory[first.nbytes - 1 :].view(second.dtype).reshape(second.shape)

    return changed(change, f"{name} must not overlap {other}")


def laid_out(label):
    """Every array that can have it in a layout of the hostile generator."""

    def change(call):
        for name, plain in call.items():
            output = name in OUTPUTS
            variants = hostile.hostile_out(plain.shape, plain.dtype) if output else hostile.hostile(plain)
            call[name] = dict(variants).get(label, plain)

    return changed(change)


def read_only(plain):
    plain.flags.writeable = False
    return plain


def zero_stride(plain):
    return as_strided(plain, plain.shape, (0, *plain.strides[1:]))


def unusual_levels(call):
    call["spatialShape"][...] = [(2, 2), (0, 7), (1, 5)]
    call["levelStartIndex"][...] = [9, 18, 7]


def further_keys(call):
    for name in ("value", "gradValue"):
        call[name] = np.repeat(call[name], 2, axis=1)


def non_finite(call):
    call["location"][0, :, 0] = np.reshape([np.nan, np.inf, -np.inf, 1e30, 0.5], (5, 1, 1, 1))
    call["attnWeight"][:, 0] = np.nan
    call["gradOutput"][:, 1] = np.inf
    call["value"][:, 3] = -np.inf


SMALL = {"bs": 1, "heads": 1, "levels": 1, "points": 1}
EMPTY = [{name: 0} for name in ("bs", "heads", "channels", "queries", "levels", "points")] + [
    {"level": (0, 3)}
]

PHASE_1 = {
    "missing input": [
        replaced(name, lambda _: None, name, "got None") for name in INPUTS if name != "levelStartIndex"
    ],
    "missing levelStartIndex": [replaced("levelStartIndex", lambda _: None, "levelStartIndex", "got None")],
    "missing output": [replaced(name, lambda _: None, name, "got None") for name in OUTPUTS],
    "one float dtype": [cast("float32"), cast("float16"), cast("bfloat16")],
    "mixed float dtypes": [
        cast("float32", "bfloat16", "float16"),
        cast(">f2", "<f4", "bfloat16", ">f4", "<f2"),
    ],
    "int32 and int64": [
        dtyped(name, dtype) for name in LEVELS for dtype in ("<i4", ">i4", "<i8", ">i8", "q", "l", "i")
    ],
    "float64 input": [dtyped(name, dtype) for name in FLOATS for dtype in ("<f8", ">f8")],
    "integer input": [dtyped(name, dtype) for name in FLOATS for dtype in ("i4", "u2", "?")],
    "other integers": [dtyped(name, dtype) for name in LEVELS for dtype in ("i1", "i2", "u1", "u4", "u8")],
    "levels as floats": [dtyped(name, dtype) for name in LEVELS for dtype in ("f4", "f8")],
    "float64 output": [dtyped(name, "f8") for name in OUTPUTS],
    "integer output": [dtyped(name, "i4") for name in OUTPUTS],
    "output of another type": [
        replaced(name, view, f"{name} must be a", kind)
        for name in reversed(OUTPUTS)
        for view, kind in ((np.ndarray.tolist, "list"), (np.ma.array, "masked array"), (memoryview, "memory"))
    ],
    "rank": [ranked(name, axes) for name in INPUTS for axes in (1, -1)],
    "last axis": [
        longer(name, -1, by, f"its last axis must be 2, got {2 + by}")
        for name in ("spatialShape", "location")
        for by in (1, -1)
    ],
    "8 channels": [sized(channels=8)],
    "256 channels": [sized(channels=256)],
    "channels % 8": [
        sized("value has shape", "its channels (axis 3) must be a multiple of 8", f"got {n}", channels=n)
        for n in (12, 1, 4, 255)
    ],
    "264 channels": [sized("value has shape", "its channels (axis 3)", "at most 256, got 264", channels=264)],
    "499999 queries": [sized(queries=499999, **SMALL)],
    "500000 queries": [
        sized("location has", "num_queries (axis 1) must be less than 500000, got", queries=500000, **SMALL)
    ],
    "16 levels": [sized(levels=16)],
    "17 levels": [sized("spatialShape has", "num_levels (axis 0) must be at most 16, got 17", levels=17)],
    "16 heads": [sized(heads=16)],
    "17 heads": [sized("value has", "num_heads (axis 2) must be at most 16, got 17", heads=17)],
    "16 points": [sized(points=16)],
    "17 points": [sized("location has", "num_points (axis 4) must be at most 16, got 17", points=17)],
    "bs differs": [
        longer(name, 0, by, f"its bs (axis 0) is {2 + by}, but that of value is 2")
        for name in ("location", "attnWeight", "gradOutput")
        for by in (1, -1)
    ],
    "num_heads differs": [
        longer(name, 2, by, f"its num_heads (axis 2) is {2 + by}, but that of value is 2")
        for name in ("location", "attnWeight")
        for by in (1, -1)
    ],
    "num_levels differs": [
        longer(name, axis, by, f"its num_levels (axis {axis}) is {2 + by}, but that of spatialShape is 2")
        for name, axis in (("levelStartIndex", 0), ("location", 3), ("attnWeight", 3))
        for by in (1, -1)
    ],
    "num_queries differs": [
        longer(name, 1, by, f"its num_queries (axis 1) is {5 + by}, but that of location is 5")
        for name in ("attnWeight", "gradOutput")
        for by in (1, -1)
    ],
    "num_points differs": [
        longer("attnWeight", 4, by, f"its num_points (axis 4) is {3 + by}, but that of location is 3")
        for by in (1, -1)
    ],
    "gradOutput's last axis": [
        longer("gradOutput", 2, by, f"last axis is {16 + by}, but num_heads*channels of value is 2*8 = 16")
        for by in (8, -8, 1)
    ],
    "shape of a gradient": [
        replaced(name, view, f"{name} must have shape (2, ", f"that of {like}, got shape (")
        for name, like in INPUT_OF.items()
        for view in (np.ndarray.flatten, lambda plain: plain[1:], lambda plain: plain[..., :1], np.transpose)
    ],
    "negative size": [
        numbered("spatialShape", (0, 0), -1, "spatialShape[0] is (-1, "),
        numbered("spatialShape", (1, 1), -3, "spatialShape[1] is (2, -3)"),
        numbered("spatialShape", (1, 1), -(2**63), f"spatialShape[1] is (2, -{2**63})"),
    ],
    "negative start": [
        numbered("levelStartIndex", 0, -1, "levelStartIndex[0] is -1"),
        numbered("levelStartIndex", 1, -(2**63), f"levelStartIndex[1] is -{2**63}"),
    ],
    "level beyond num_keys": [
        numbered("levelStartIndex", 0, 7, "level 0 reaches", "levelStartIndex[0] + H*W of spatialShape[0]"),
        numbered(
            "spatialShape", (1, 0), 3, "levelStartIndex[1] + H*W of spatialShape[1] is 6 + 3*3 = 15", "12"
        ),
        numbered("levelStartIndex", 1, 2**63 - 1, "level 1", f"{2**63 - 1 + 6}"),
    ],
    "huge level": [
        numbered("spatialShape", 0, 2**62, "level 0", f"{2**124}"),
        numbered("spatialShape", 1, 2**63 - 1, "level 1"),
    ],
    "output overlaps itself": [
        replaced(name, zero_stride, f"{name} must not overlap itself") for name in OUTPUTS
    ],
    "read-only output": [replaced(name, read_only, f"{name} must be writeable") for name in OUTPUTS],
    "output overlaps another": [
        overlapping(name, other) for k, name in enumerate(OUTPUTS) for other in INPUTS[::-1] + OUTPUTS[:k]
    ],
    "empty": [sized(**sizes) for sizes in EMPTY],
    "layouts": [
        laid_out(label)
        for label in ("gaps in every axis", "unaligned", "mixed 0", "mixed 1, byte-swapped", "read-only")
    ],
    "unusual levels": [changed(unusual_levels, levels=3)],
    "keys of no level": [changed(further_keys)],
    "non-finite numbers": [changed(non_finite)],
}


# Rows about phase 2: what to change in its arguments, and what the message has in it


def given_as(name, *values):
    """The argument of that name replaced by each of these."""
    return [lambda right, value=value: right.update({name: value}) for value in values]


def made_as(name, *functions):
    """The argument of that name replaced by what each of these makes of the size that phase 1 gave."""
    return [lambda right, make=make: right.update({name: make(right["workspaceSize"])}) for make in functions]


def overlapped(name):
    """The last byte of an array is the first of the workspace."""

    def edit(right):
        call = Sketch().call(np.random.default_rng(0))
        plain = call[name]
        memory = np.zeros(plain.nbytes + 100_000, np.uint8)
        call[name] = memory[: plain.nbytes].view(plain.dtype).reshape(plain.shape)
        call[name][...] = plain
        size, executor = prepared(call)
        right.update(workspace=memory[plain.nbytes - 1 :], workspaceSize=size, executor=executor)

    return edit


PHASE_2 = {
    "no executor": (
        given_as("executor", None, 0, "executor", aclnn.aclOpExecutor, (AclnnStatus(0), 1000, None)),
        "executor must come from phase 1",
    ),
    "stream": (given_as("stream", 0, False, b"stream"), "stream must be None"),
    "workspaceSize of another type": (
        given_as("workspaceSize", None, "1000000", 1e6, [1_000_000]),
        "workspaceSize must be an integer",
    ),
    "workspaceSize too small": (
        made_as("workspaceSize", *(lambda n, less=less: n - less for less in (1, 1000, 2**70, 10**5000)))
        + given_as("workspaceSize", 0, -1),
        "workspaceSize must be at least ",
    ),
    "no buffer": (
        made_as("workspace", int, "x".__mul__, [0].__mul__),
        "workspace must be a buffer",
    ),
    "read-only workspace": (
        made_as("workspace", bytes, lambda n: memoryview(bytearray(n)).toreadonly())
        + made_as("workspace", lambda n: read_only(np.zeros(n))),
        "workspace must be writable, got a read-only buffer",
    ),
    "scattered workspace": (
        made_as(
            "workspace",
            lambda n: np.zeros(2 * n, np.uint8)[::2],
            lambda n: memoryview(bytearray(n))[::-1],
            lambda n: np.zeros((n, 2), np.uint8, order="F"),
        ),
        "workspace must be contiguous",
    ),
    "Python objects": (
        made_as(
            "workspace",
            lambda n: np.zeros(n, object),
            lambda n: memoryview(np.zeros(n, object)),
            lambda n: np.zeros(n, [("number", "i4"), ("any", object)]),
        ),
        "workspace must hold no Python objects",
    ),
    "workspace too small": (
        made_as("workspace", lambda n: bytearray(n - 1), lambda n: np.zeros(n // 9))
        + given_as("workspace", None, bytearray())
        + made_as("workspaceSize", lambda n: n + 1)
        + given_as("workspaceSize", 2**63, 10**5000),
        "workspace must have workspaceSize = ",
    ),
    "workspace overlaps an array": (
        [overlapped(name) for name in INPUTS + OUTPUTS],
        "workspace must not overlap ",
    ),
    "kinds of workspaces": (
        made_as(
            "workspace",
            bytearray,
            lambda n: np.empty(n, np.uint8),
            lambda n: np.zeros((n // 16 + 1, 2), ">f8"),
            lambda n: np.zeros(n, [("Odd", "i4"), ("O", "u1")]),
            lambda n: memoryview(bytearray(n)),
            lambda n: array.array("B", bytes(n)),
            lambda n: (ctypes.c_char * n)(),
            lambda n: mmap.mmap(-1, n),
        ),
        None,
    ),
    "larger workspace": (
        [
            *made_as("workspace", lambda n: bytearray(n + 12345)),
            lambda right: right.update(workspace=bytearray(99999), workspaceSize=np.int32(99998)),
        ],
        None,
    ),
}


@pytest.fixture
def right():
    """Right arguments of phase 2, and the call that they belong to."""
    call = Sketch().call(np.random.default_rng(7))
    workspace_size, executor = prepared(call)
    return call, {
        "workspace": bytearray(workspace_size),
        "workspaceSize": workspace_size,
        "executor": executor,
        "stream": None,
    }


# The tables


def rows():
    """Read the tables of docs/limits.md: a dict of the cells for each row, without the markup of code."""
    read = []
    header = None
    for line in (DOCS / "limits.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = [cell.replace("`", "") for cell in cells]
        elif not cells[0].startswith("---"):
            read.append(dict(zip(header, cells, strict=True)))
    for row in read:
        row["test"] = [name.strip("`") for name in row["test"].split(", ")]
    return read


ROWS = rows()
ROW_OF = {name: row for row in ROWS for name in row["test"]}


def test_every_row_has_a_test_and_every_case_a_row():
    assert len(ROWS) > 60 and all(row["test"] for row in ROWS)
    named = [name for row in ROWS for name in row["test"]]
    assert len(named) == len(set(named))
    functions = [name for name in named if name.startswith("test_")]
    assert [name for name in functions if not callable(globals().get(name))] == []
    others = [name for name in named if not name.startswith("test_")]
    assert others == [*PHASE_1, *PHASE_2]
    assert all(of_row for of_row in PHASE_1.values()) and all(edits for edits, _ in PHASE_2.values())


@pytest.mark.parametrize("name", PHASE_1)
def test_phase_1(name):
    row = ROW_OF[name]
    status = AclnnStatus(int(row["msda.aclnn"]))
    if name in ("one float dtype", "mixed float dtypes"):
        dtype_of("bfloat16")
    for k, case in enumerate(PHASE_1[name]):
        call = sketched(case).call(np.random.default_rng(k))
        before = contents(call)
        if status == 0:
            assert_right(call)
            assert contents(call, INPUTS) == {each: before[each] for each in INPUTS}
        else:
            assert_refused(phase_1(**call), status, *case.fragments)
            assert contents(call) == before
        out = tuple(call[each] for each in OUTPUTS)
        if row["msda.backward"].startswith("computes"):
            backward(call, out)
        else:
            with pytest.raises(Exception) as caught:
                backward(call, out)
            assert caught.type.__name__ == row["msda.backward"]


REFUSED = [name for name in PHASE_1 if ROW_OF[name]["msda.aclnn"] != "0"]


@pytest.mark.parametrize("name", REFUSED)
def test_of_two_faults_the_one_whose_row_comes_first_is_reported(name):
    status = int(ROW_OF[name]["msda.aclnn"])
    first = PHASE_1[name][0]
    for later in REFUSED[REFUSED.index(name) + 1 :]:
        call = sketched(first, PHASE_1[later][0]).call()
        assert_refused(phase_1(**call), status, *first.fragments)


@pytest.mark.parametrize("name", PHASE_2)
def test_phase_2(name, right):
    call, arguments = right
    before = contents(call)
    edits, fragment = PHASE_2[name]
    status = int(ROW_OF[name]["status"])
    for edit in edits:
        edited = dict(arguments)
        edit(edited)
        result = phase_2(**edited)
        if status == 0:
            assert result == 0 and type(result) is AclnnStatus
            assert_same(results(call), expected(call))
        else:
            assert_refused(result, status, fragment)
            assert contents(call) == before


def test_of_two_faults_in_phase_2_the_one_whose_row_comes_first_is_reported(right):
    _, arguments = right
    faults = [entry for entry in PHASE_2.values() if entry[1]]
    for k, (edits, fragment) in enumerate(faults):
        for later_edits, _ in faults[k + 1 :]:
            edited = dict(arguments)
            later_edits[0](edited)
            edits[0](edited)
            assert_refused(phase_2(**edited), 161002, fragment)


def test_phase_1_reads_the_arguments_in_their_order():
    for k, name in enumerate(INPUTS + OUTPUTS):
        for later in (INPUTS + OUTPUTS)[k + 1 :]:
            call = Sketch().call()
            call[name], call[later] = None, None
            assert_refused(phase_1(**call), 161001, f"{name} must be")
            call[name], call[later] = np.zeros(1, "c16"), np.zeros(1, "c16")
            assert_refused(phase_1(**call), 161002, f"{name} must be")
    assert_refused(phase_1(*[None] * 9), 161001, "value must be")


def test_environment_without_a_number(monkeypatch):
    monkeypatch.setattr(threads, "_set_by_user", None)
    monkeypatch.setenv("MSDA_NUM_THREADS", "many")
    if not threads._system.openmp():
        pytest.skip("built without OpenMP: nobody looks")
    call = Sketch(queries=20).call()
    prepared(call)
    monkeypatch.setattr(threads, "SMALL_WORK", 0)
    assert_refused(phase_1(**call), 161002, "MSDA_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="MSDA_NUM_THREADS"):
        backward(call, tuple(results(call).values()))


# The same bits as msda.backward


@pytest.mark.parametrize("seed", range(12))
def test_same_bits_as_backward(seed):
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["float16", "bfloat16", "float32"], 7)
    problem = random_problem(
        rng,
        *random_levels(rng),
        bs=int(rng.integers(1, 4)),
        heads=int(rng.integers(1, 4)),
        channels=8 * int(rng.integers(1, 6)),
        queries=int(rng.integers(1, 40)),
        points=int(rng.integers(1, 5)),
        dtypes=kinds[:4],
    )
    call = call_of(problem, *map(dtype_of, kinds[4:]))
    assert_right(call)
    # Where the dtypes are those of the inputs, nothing need be said to msda.backward.
    plain = call_of(problem)
    computed(plain)
    assert_same(results(plain), dict(zip(OUTPUTS, msda.backward(*problem), strict=True)))


@pytest.mark.parametrize("name", cases.names())
def test_cases_with_known_results(name):
    case = cases.load(name)
    call = call_of([case[key] for key in (*cases.INPUTS, "grad_output")])
    channels = call["value"].shape[3]
    if channels % 8 or channels > 256:
        assert_refused(phase_1(**call), 161002, "channels")
        return
    assert_right(call)
    for each, key in zip(OUTPUTS, cases.RESULTS[1:], strict=True):
        norm = np.linalg.norm(case[key])
        assert np.linalg.norm(call[each] - case[key]) <= 3e-7 * norm


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", INPUTS)
def test_any_layout_of_an_input(name, dtype):
    if name in LEVELS and dtype != "float32":
        pytest.skip("integers")
    problem = random_problem(np.random.default_rng(3), bs=2, heads=2, channels=8, dtypes=dtype)
    plain = call_of(problem)
    right = {each: computed(plain)[each].copy() for each in OUTPUTS}
    for label, variant in hostile.hostile(plain[name]):
        call = call_of(problem)
        call[name] = variant
        before = contents(call, INPUTS)
        assert_same(computed(call), right, label)
        assert contents(call, INPUTS) == before, label


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 40])  # few enough that rows are touched in the caller's array, or not
@pytest.mark.parametrize("name", OUTPUTS)
def test_any_layout_of_an_output(name, queries, dtype):
    problem = random_problem(np.random.default_rng(4), bs=2, heads=2, channels=8, queries=queries)
    dtype = dtype_of(dtype)
    plain = call_of(problem)
    plain[name] = garbage(plain[name].shape, dtype)
    right = {each: computed(plain)[each].copy() for each in OUTPUTS}
    for label, variant in hostile.hostile_out(plain[name].shape, dtype):
        call = call_of(problem)
        call[name] = variant
        assert_same(computed(call), right, label)
        assert hostile.gaps_intact(variant), label


def test_inputs_may_be_whatever_can_be_read_as_an_array():
    call = Sketch().call(np.random.default_rng(5))
    right = expected(call)
    for name in LEVELS:
        call[name] = call[name].tolist()
    for name in FLOATS:
        call[name] = memoryview(call[name])
    assert_same(computed(call), right)
    call["value"] = np.asarray(call["value"]).tolist()  # to NumPy, float64
    assert_refused(phase_1(**call), 161002, "value must be a float32, float16 or bfloat16 array, got dtype")


def test_locations_are_x_y():
    call = Sketch(bs=1, heads=1, levels=1, points=1, queries=1, level=(2, 5)).call()
    call["value"][0, :, 0] = np.tile(np.arange(5), 2)[:, np.newaxis]  # rises by 1 from column to column
    call["attnWeight"][...] = 1
    call["gradOutput"][...] = 1
    call["location"][...] = (0.3, 0.5)
    assert computed(call)["gradLocation"].ravel().tolist() == [5 * 8, 0]
    assert call["gradAttnWeight"].item() == 8

    # What was (y, x) all along
    flipped = call | {
        "location": call["location"][..., ::-1].copy(),
        "gradLocation": np.ones_like(call["location"]),
    }
    computed(flipped | {name: flipped[name][..., ::-1] for name in ("location", "gradLocation")})
    assert flipped["gradLocation"].ravel().tolist() == [0, 5 * 8]
    gradients = msda.backward(*(flipped[name] for name in INPUTS), coordinate_order="yx")
    assert_same(gradients.sampling_locations, flipped["gradLocation"])


def test_the_documents_example():
    text = (DOCS / "ascend.md").read_text(encoding="utf-8")
    program = text.split("## The document's example")[1].split("```python\n")[1].split("```")[0]
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, names)
    assert printed.getvalue().splitlines() == [f"result[{i}] is: 8.000000" for i in range(8)]
    assert names["grad_value"].tolist() == [[[[8.0] * 8]]]
    assert names["grad_location"].ravel().tolist() == [4.0] * 64
    assert names["grad_attn_weight"].ravel().tolist() == [2.0] * 32


# Empty inputs


@pytest.mark.parametrize("empty", EMPTY, ids=lambda sizes: "no " + next(iter(sizes)))
def test_empty_inputs_need_no_workspace(empty):
    call = Sketch(**empty).call(np.random.default_rng(6))
    for name in OUTPUTS:
        call[name] = garbage(call[name].shape, np.float32)
    workspace_size, executor = prepared(call)
    assert workspace_size == 0
    assert phase_2(None, 0, executor, None) == 0
    for name in OUTPUTS:
        assert not call[name].any()
        call[name][...] = 1
    for workspace in (bytearray(), bytearray(10), np.empty(0), mmap.mmap(-1, 1)):
        assert phase_2(workspace, 0, executor, None) == 0
    assert not any(call[name].any() for name in OUTPUTS)
    assert_refused(phase_2(None, 1, executor, None), 161002, "workspaceSize = 1 bytes, got None")
    assert_refused(phase_2(None, -1, executor, None), 161002, "workspaceSize must be at least 0")
    assert_refused(phase_2(bytes(5), 0, executor, None), 161002, "writable")


@pytest.mark.parametrize("empty", [{"queries": 0}, {"levels": 0, "level": (2, 2)}, {"points": 0}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_without_samples_the_gradient_of_value_is_zero_in_any_layout(empty, dtype):
    call = Sketch(**empty).call()
    call["value"] = np.full((2, 13, 2, 8), np.nan, np.float32)
    for label, variant in hostile.hostile_out(call["value"].shape, dtype_of(dtype)):
        call["gradValue"] = variant
        workspace_size, executor = prepared(call)
        assert workspace_size == 0
        assert phase_2(None, 0, executor, None) == 0
        assert variant.tobytes() == bytes(variant.nbytes), label
        assert hostile.gaps_intact(variant), label


def test_without_channels_the_bits_are_those_of_backward():
    call = Sketch(channels=0).call(np.random.default_rng(8))
    call["attnWeight"][:, ::2] *= -1
    call["attnWeight"][:, 1] = np.inf
    assert_right(call)
    assert np.signbit(call["gradLocation"]).any() and np.isnan(call["gradLocation"]).any()


# The workspace


class Planned(NamedTuple):
    """A call that is cut in a certain way by this number of threads and of queries in a block."""

    sizes: dict[str, Any]
    threads: int
    query_block: int
    cut: tuple[Any, ...] | None  # packed rows, parts, chunks, chunks apart; None: no matter
    value_dtype: str = "f2"  # so rows must be packed
    in_order: bool = False  # the queries, down the map

    def prepare(self):
        """Run phase 1, for a plan that is cut as it should be. The settings of msda stay changed."""
        threads.SMALL_WORK = 0
        threads.set_num_threads(self.threads)
        reference.QUERY_BLOCK = self.query_block
        sketch = Sketch(**self.sizes)
        sketch.dtypes["value"] = np.dtype(self.value_dtype)
        if self.in_order:
            sketch.changes.append(lambda call: call["location"].sort(axis=1))
        call = sketch.call(np.random.default_rng(9))
        workspace_size, executor = prepared(call)
        plan = executor._plan
        if self.cut and threads._system.openmp():
            assert plan.threads == self.threads
            assert (plan.packed, plan.parts.count, plan.chunks, plan.chunks_apart) == self.cut
        return call, workspace_size, executor


# Of this map's packed rows less than half are there at a time.
WINDOW = {"bs": 1, "levels": 1, "level": (400, 3), "channels": 256, "queries": 480, "points": 8}

PLANS = {
    "packed": Planned({"queries": 40}, 1, 16384, (True, 1, 1, False)),
    "in place": Planned({"queries": 3, "level": (7, 9)}, 1, 16384, (False, 1, 1, False), "f4"),
    "heads": Planned({"queries": 40}, 4, 16384, (True, 1, 1, False)),
    "parts": Planned({"bs": 1, "heads": 1, "levels": 4, "queries": 20}, 2, 16384, (True, 4, 1, False)),
    "blocks in turn": Planned({"queries": 40}, 2, 8, (True, 1, 5, False)),
    "blocks apart": Planned({"bs": 1, "heads": 1, "queries": 40}, 3, 8, (True, 1, 5, True)),
    "a window": Planned(WINDOW, 1, 240, (True, 1, 2, False), in_order=True),
    "a window, sums in gradValue": Planned(WINDOW, 2, 240, (True, 1, 2, False), "f4", in_order=True),
}


@pytest.fixture
def settled(monkeypatch):
    """Undo what Planned.prepare changes."""
    monkeypatch.setattr(threads, "SMALL_WORK", threads.SMALL_WORK)
    monkeypatch.setattr(threads, "_set_by_user", None)
    monkeypatch.setattr(reference, "QUERY_BLOCK", reference.QUERY_BLOCK)


@pytest.mark.parametrize("name", PLANS)
def test_exact_workspace(name, settled):
    call, workspace_size, executor = PLANS[name].prepare()
    right = expected(call)
    assert workspace_size > 0
    assert_refused(phase_2(bytearray(workspace_size), workspace_size - 1, executor, None), 161002)
    canary = 200
    for offset in (*range(70), 128):
        memory = np.full(canary + offset + workspace_size + canary, GARBAGE, np.uint8)
        begin, end = canary + offset, canary + offset + workspace_size
        for name in OUTPUTS:
            call[name].view(np.uint8)[...] = GARBAGE
        assert phase_2(memory[begin:end], workspace_size, executor, None) == 0
        assert np.all(memory[:begin] == GARBAGE) and np.all(memory[end:] == GARBAGE)
        assert_same(results(call), right, offset)


def test_only_the_bytes_that_workspace_size_grants_are_used(right):
    call, arguments = right
    size = arguments["workspaceSize"]
    memory = np.full(size + 1000, GARBAGE, np.uint8)
    assert phase_2(memory, size, arguments["executor"], None) == 0
    assert np.all(memory[size:] == GARBAGE)
    # So what lies behind them may be an array of the call.
    memory = np.full(size + call["gradLocation"].nbytes, GARBAGE, np.uint8)
    call["gradLocation"] = memory[size:].view(np.float32).reshape(call["gradLocation"].shape)
    assert prepared(call)[0] == size
    assert phase_2(memory, size, prepared(call)[1], None) == 0
    assert_same(results(call), expected(call))
    assert_refused(phase_2(memory, size + 1, prepared(call)[1], None), 161002, "gradLocation")


def test_what_the_workspace_holds_does_not_matter(settled):
    for planned in PLANS.values():
        call, workspace_size, executor = planned.prepare()
        right = expected(call)
        for byte in (0, 0xFF, 0x7F):
            assert phase_2(bytearray([byte]) * workspace_size, workspace_size, executor, None) == 0
            assert_same(results(call), right)


def test_a_workspace_is_let_go_of(right):
    _, arguments = right
    assert phase_2(**arguments) == 0
    arguments["workspace"].append(0)  # a BufferError while anybody holds on to the bytes
    assert_refused(phase_2(**(arguments | {"stream": 1})), 161002)
    arguments["workspace"].append(0)


def test_number_of_threads_changes_no_bit(settled):
    for planned in PLANS.values():
        seen = []
        for num_threads in (1, 2, 3, 5):
            _, _, executor = planned.prepare()
            threads.set_num_threads(num_threads)
            call = {name: executor._arrays[name] for name in INPUTS + OUTPUTS}
            seen.append({name: computed(call)[name].copy() for name in OUTPUTS})
            assert_same(seen[-1], seen[0])


def test_phase_2_allocates_nothing_that_grows(settled):
    peaks = {}
    for name, planned in PLANS.items():
        for scale in (1, 12):
            sizes = planned.sizes | {
                "queries": scale * planned.sizes["queries"],
                "level": (scale * 7, scale * 9),
            }
            call, workspace_size, executor = planned._replace(sizes=sizes, cut=None).prepare()
            workspace = bytearray(workspace_size)
            assert phase_2(workspace, workspace_size, executor, None) == 0
            tracemalloc.start()
            try:
                status = phase_2(workspace, workspace_size, executor, None)
                peaks[name, scale] = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert status == 0
    assert max(peaks.values()) < 20_000
    # The data do grow.
    assert sum(each.nbytes for each in call.values()) > 500_000


def script(code, timeout=120):
    """Run a script in a process of its own, and return what it prints. It can import from this file."""
    begin = f"""
        import os, sys
        sys.path.insert(0, {str(TESTS)!r})
        from test_aclnn import *
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.limits_memory
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc here")
def test_phase_2_under_a_memory_limit():
    assert "as it should be" in script(
        """
        import resource

        threads.set_num_threads(2)
        sizes = dict(bs=1, heads=4, channels=64, queries=3000, level=(70, 90))
        call = Sketch(**sizes).call(np.random.default_rng(11))
        call["value"] = call["value"].astype(np.float16)  # to be widened
        call["gradValue"] = call["value"].copy()
        workspace_size, executor = prepared(call)
        assert workspace_size > 2**20
        workspace = np.zeros(workspace_size, np.uint8)
        # Threads are started, and whatever a first call loads is loaded.
        msda.backward(*(call[name] for name in INPUTS), num_threads=2)
        run(*prepared(Sketch(queries=300).call()))

        pages = int(open("/proc/self/statm").read().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**18, hard))
        eaten = []
        try:
            while len(eaten) < 10_000:
                eaten.append(bytearray(2**17))
        except MemoryError:
            status = phase_2(workspace, workspace_size, executor, None)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

        assert status == 0
        assert_same(results(call), expected(call))
        print("as it should be")
        """
    )


# Executors


def test_second_run(right):
    call, arguments = right
    right_results = expected(call)
    for _ in range(3):
        for name in OUTPUTS:
            call[name].view(np.uint8)[...] = GARBAGE
        assert phase_2(**arguments) == 0
        assert_same(results(call), right_results)


def test_a_run_sees_what_the_arrays_hold_by_then(right):
    call, arguments = right
    assert phase_2(**arguments) == 0
    other = Sketch().call(np.random.default_rng(12))
    for name in FLOATS:
        call[name][...] = other[name]
        assert phase_2(**arguments) == 0
        assert_same(results(call), expected(call))
    assert_same(results(call), expected(other))


def test_levels_are_those_of_phase_1(right):
    call, arguments = right
    right_results = expected(call)
    for name in LEVELS:
        call[name][...] = 2**31 - 1
    assert phase_2(**arguments) == 0
    assert_same(results(call), right_results)


def test_an_executor_keeps_its_arrays_alive(right):
    call, arguments = right
    right_results = expected(call)
    grad_value = call["gradValue"]
    for name in INPUTS:
        del call[name]
    assert phase_2(**arguments) == 0
    assert_same(grad_value, right_results["gradValue"])


def test_phase_1_writes_nothing():
    call = Sketch().call(np.random.default_rng(13))
    before = contents(call)
    prepared(call)
    assert contents(call) == before


@needs_openmp
def test_an_executor_has_the_threads_of_phase_1(settled):
    call, workspace_size, executor = PLANS["heads"].prepare()
    threads.set_num_threads(1)
    run(workspace_size, executor)
    assert threads.last_team() == 4
    run(*prepared(call))
    assert threads.last_team() == 1


def test_small_calls_stay_on_one_thread(monkeypatch):
    monkeypatch.setattr(threads, "_set_by_user", 4)
    _, executor = prepared(Sketch(queries=40).call())
    assert executor._plan.threads == 1


def test_threads_that_run_one_executor_take_turns(monkeypatch, right):
    call, arguments = right
    active = []
    compute = aclnn.aclOpExecutor._compute

    def alone(executor, scratch):
        active.append(1)
        assert len(active) == 1
        time.sleep(0.002)
        compute(executor, scratch)
        active.pop()

    monkeypatch.setattr(aclnn.aclOpExecutor, "_compute", alone)
    statuses = []

    def work():
        workspace = bytearray(arguments["workspaceSize"])
        for _ in range(5):
            statuses.append(phase_2(**(arguments | {"workspace": workspace})))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert statuses == [0] * 20
    assert_same(results(call), expected(call))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_a_run_within_a_run(settled):
    threads.set_num_threads(1)
    call = Sketch(queries=9000, channels=64, points=4).call(np.random.default_rng(14))
    workspace_size, executor = prepared(call)
    workspace, workspace_of_handler = bytearray(workspace_size), bytearray(workspace_size)
    statuses = []

    def handler(*_):
        statuses.append(phase_2(workspace_of_handler, workspace_size, executor, None))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        deadline = time.monotonic() + 60
        while 161002 not in statuses and time.monotonic() < deadline:
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            assert phase_2(workspace, workspace_size, executor, None) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(statuses) <= {0, 161002}
    assert_refused(statuses[-1], 161002, "executor", "signal handler")
    assert_same(results(call), expected(call))


def test_what_a_signal_handler_raises_is_no_status(monkeypatch, right):
    def interrupted(executor, scratch):
        raise ValueError("from a handler")

    _, arguments = right
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="from a handler"):
        patched.setattr(aclnn.aclOpExecutor, "_compute", interrupted)
        phase_2(**arguments)
    assert phase_2(**arguments) == 0


@needs_fork
@pytest.mark.parametrize("name", PLANS)
def test_forked_children_run_executors_of_their_parent(name):
    # The parent has used its threads, so the child's OpenMP runtime believes in them.
    assert script(
        f"""
        import signal

        call, workspace_size, executor = PLANS[{name!r}].prepare()
        run(workspace_size, executor)
        right = {{name: call[name].copy() for name in OUTPUTS}}

        def child(executor, workspace_size):
            signal.alarm(60)
            try:
                for name in OUTPUTS:
                    call[name].view(np.uint8)[...] = GARBAGE
                run(workspace_size, executor)
                assert threads.last_team() == 1
                assert_same(results(call), right)
                if not os.getppid() == first:
                    os._exit(0)
                if (grandchild := os.fork()) == 0:
                    child(executor, workspace_size)
                assert os.waitpid(grandchild, 0)[1] == 0
                # A child's own executor
                own_size, own = prepared(call)
                run(own_size, own)
                assert_same(results(call), right)
                os._exit(0)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)

        first = os.getpid()
        pid = os.fork()
        if pid == 0:
            child(executor, workspace_size)
        print("child ended with", os.waitpid(pid, 0)[1])
        """
    ).splitlines() == ["child ended with 0"]


@needs_fork
def test_children_forked_during_a_run_do_not_wait_for_it():
    assert script(
        """
        import signal

        call = Sketch(queries=9000, channels=64).call(np.random.default_rng(15))
        workspace_size, executor = prepared(call)
        right = expected(call)
        ended = threading.Event()

        def work():
            while not ended.is_set():
                run(workspace_size, executor)

        worker = threading.Thread(target=work)
        worker.start()
        states = []
        for _ in range(10):
            time.sleep(0.003)
            pid = os.fork()
            if pid == 0:
                signal.alarm(60)
                run(workspace_size, executor)
                assert_same(results(call), right)
                os._exit(0)
            states.append(os.waitpid(pid, 0)[1])
        ended.set()
        worker.join()
        print(states)
        """
    ).splitlines() == [str([0] * 10)]


# Messages and statuses


def test_statuses_are_the_operators_numbers():
    assert {status.name: int(status) for status in AclnnStatus} == {
        "ACLNN_SUCCESS": 0,
        "ACLNN_ERR_PARAM_NULLPTR": 161001,
        "ACLNN_ERR_PARAM_INVALID": 161002,
    }


def test_the_last_message_is_each_threads_own(right):
    _, arguments = right
    seen = {}

    def work():
        seen["at first"] = aclGetRecentErrMsg()
        phase_2(**(arguments | {"stream": 5}))
        seen["afterwards"] = aclGetRecentErrMsg()

    assert_refused(phase_1(*[None] * 9), 161001, "value")
    before = aclGetRecentErrMsg()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == {"at first": None, "afterwards": "stream must be None, got 5"}
    assert aclGetRecentErrMsg() == before
    assert phase_2(**arguments) == 0
    assert aclGetRecentErrMsg() == before
    assert_refused(phase_2(**(arguments | {"executor": None})), 161002, "executor")
    assert aclGetRecentErrMsg() != before


# Whatever is passed

EXAMPLES = os.environ.get("MSDA_EXAMPLES")
any_number = settings(
    max_examples=int(EXAMPLES or 300), derandomize=EXAMPLES is None, deadline=None, print_blob=True
)


class Reluctant:
    """Cannot be read as anything."""

    def __array__(self, *_, **__):
        raise RuntimeError("no")

    def __index__(self):
        raise RuntimeError("no")


DTYPES = ["f4", ">f4", "f2", "f8", "i4", ">i8", "u1", "?", "c8", "S3", "U2", "M8[s]", "O", "V5", "i4,f4"]


@st.composite
def arrays(draw, like=None):
    """Arrays of any shape and dtype, or almost those of another array."""
    if like is None:
        shape = draw(st.lists(st.integers(0, 3), max_size=7))
        dtype = draw(st.sampled_from(DTYPES))
    else:
        shape = list(like.shape)
        dtype = like.dtype if draw(st.integers(0, 5)) else draw(st.sampled_from(DTYPES))
        if draw(st.booleans()):
            shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([*range(5), 8, 16, 17]))
    made = np.zeros(shape, dtype)
    if made.dtype.kind in "if":
        made[...] = draw(st.integers(-1, 2))
    if made.size and draw(st.integers(0, 3)) == 0:
        made = np.broadcast_to(made.flat[0], shape)
    return made[::-1] if made.ndim and draw(st.booleans()) else made


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=20),
    st.recursive(
        st.integers(-3, 3) | st.floats(-1, 1), lambda each: st.lists(each, max_size=3), max_leaves=8
    ),
    st.just(np.float32(1)),
    st.just(Reluctant()),
    st.just(np.array),
    arrays(),
)


@given(data=st.data())
@any_number
def test_phase_1_answers_with_a_status_whatever_is_passed(data):
    size = st.sampled_from([1, 2, 3, 1, 2, 3, 1, 2, 3, 0])
    sketch = Sketch(
        bs=data.draw(size),
        heads=data.draw(size),
        channels=8 * data.draw(size),
        queries=data.draw(size),
        levels=data.draw(size),
        points=data.draw(size),
        level=data.draw(st.tuples(size, size)),
    )
    call = sketch.call(np.random.default_rng(0))
    changed = data.draw(st.lists(st.sampled_from(INPUTS + OUTPUTS), unique=True, max_size=3))
    for name in changed:
        call[name] = data.draw(arrays(call[name]) if data.draw(st.integers(0, 4)) else anything)
    before = contents(call)
    status, workspace_size, executor = phase_1(**call)
    assert contents(call) == before
    if status == 0:
        run(workspace_size, executor)
        assert_same(results(call), expected(call))
    else:
        assert_refused((status, workspace_size, executor), status)
        assert any(name in aclGetRecentErrMsg() for name in changed)
        if status == 161001:
            assert any(call[name] is None for name in changed)


@given(
    workspace=anything | st.binary(max_size=60000).map(bytearray),
    size=anything | st.integers(30000, 60000),
    executor=anything,
    stream=anything,
)
@any_number
def test_phase_2_answers_with_a_status_whatever_is_passed(workspace, size, executor, stream):
    workspace_size, right = prepared(Sketch().call())
    assert_refused(phase_2(workspace, size, executor, stream), 161002)
    status = phase_2(workspace, size, right, None)
    assert status == 161002 or (status == 0 and len(workspace) >= size >= workspace_size)
    if stream is not None:
        assert_refused(phase_2(bytearray(workspace_size), workspace_size, right, stream), 161002, "stream")
