"""Any call, right or wrong: results with the bits of the reference, or an error that names a wrong argument.

The environment variable MSDA_EXAMPLES says how many calls are tried. Without it, they are the same ones every time.
"""

import itertools
import os
import time
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msda
from compare import DTYPES, FLOATS, assert_same, random_problem
from msda import plan, reference

GIVEN = os.environ.get("MSDA_EXAMPLES")
GRADIENTS = msda.Gradients._fields


def laid_out(rng, array):
    """Copy an array into another layout, and perhaps the other byte order."""
    order = rng.permutation(array.ndim)
    steps = rng.integers(1, 3, array.ndim)
    flips = tuple(slice(None, None, sign) for sign in rng.choice([-1, 1], array.ndim))
    wide = [n * step for n, step in zip(array.shape, steps, strict=True)]
    dtype = array.dtype.newbyteorder(rng.choice(["=", "S"]))
    offset = int(rng.integers(0, 9))
    buffer = np.zeros(int(np.prod(wide)) * dtype.itemsize + offset, np.uint8)
    base = np.ndarray([wide[axis] for axis in order], dtype, buffer, offset)
    base = base.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)][flips]
    base[...] = array
    return base


class Treacherous:
    """Raises whatever is asked of it."""

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("no")

    __array__ = __index__ = __len__ = __iter__ = __bool__ = __eq__ = __float__ = _refuse
    __hash__ = None


ODDITIES = [None, 0, -1, 3, 1.5, True, np.nan, 1j, "", "value", b"xy", [], (), [[]], [[], [1]], {}, {"value"}]
ODDITIES += [
    object(),
    np.ndarray,
    Treacherous(),
    range(2),
    10**999,
    "x" * 10**5,
    (None, None, None),
    [3, "x"],
]
ODDITIES += [np.float32(1), np.array(3), np.zeros(0), np.zeros((2, 2)), np.full((2, 2), 2**63, np.uint64)]
ODDITIES += [np.zeros((1, 2), "V6"), np.array(["x"]), np.array([None]), np.zeros(3, "M8[s]")]
ODDITIES += [np.ma.zeros((1, 1, 1, 1)), np.zeros((1, 2), np.longdouble)]
ODDITIES += [[[2**62, 2**62]], [[-1, 2]], [-1], [2**70], [[2**64, 0]], ["1"], [1.0], [True]]
DTYPES_OF_OTHERS = ["?", "i4", "u8", "c8", "c16", "g", "O", "S4", "U2", "V4"]


SEED = st.integers(0, 2**32 - 1)
# What is drawn one by one costs more than the call that is tested, hence the products. An axis may be empty, but not
# too often.
LEVEL = st.sampled_from(list(itertools.product([2, 1, 3, 4, 5, 6, 0], repeat=2)))
FOUR_DTYPES = st.sampled_from(list(itertools.product(DTYPES, repeat=4)))
OPTIONS = st.sampled_from(
    list(
        itertools.product(
            [None, 1, 2, 3, np.int16(4)],
            ["xy", "yx"],
            [GRADIENTS, GRADIENTS[:1], GRADIENTS[1:], list(GRADIENTS[:2]), set(), "value"],
        )
    )
)
SIZES = {
    "bs": st.sampled_from([1, 1, 1, 2, 2, 3, 0]),
    "heads": st.sampled_from([1, 1, 1, 2, 2, 3, 0]),
    "channels": st.sampled_from([*range(1, 20), 33, 0]),
    "queries": st.sampled_from([*range(1, 9), 0]),
    "points": st.sampled_from([1, 1, 2, 2, 3, 4, 0]),
}


@st.composite
def problems(draw):
    """Draw a tiny problem that is right, in any layout; and the generator that gave its numbers."""
    levels = draw(st.sampled_from([1, 2, 3, 4, 0]))
    shapes = np.array(draw(st.lists(LEVEL, min_size=levels, max_size=levels)), np.int64).reshape(-1, 2)
    sizes = draw(st.fixed_dictionaries(SIZES))
    dtypes = draw(FOUR_DTYPES)
    rng = np.random.default_rng(draw(SEED))
    areas = shapes.prod(axis=1)
    starts, num_keys = None, int(areas.sum())
    if rng.integers(0, 2):
        num_keys = int(areas.max(initial=0) + rng.integers(0, areas.sum() + 3))
        starts = rng.integers(0, num_keys - areas + 1)
    problem = random_problem(rng, shapes, starts, num_keys, **sizes, dtypes=dtypes)
    for name in FLOATS:
        array = getattr(problem, name)
        if array.size and rng.integers(0, 8) == 0:
            array.flat[rng.integers(0, array.size)] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
        array = laid_out(rng, array)
        array.flags.writeable = bool(rng.integers(0, 2))
        problem = problem._replace(**{name: array})
    kind = rng.integers(0, 3)
    if kind == 0:
        listed = None if starts is None else starts.tolist()
        problem = problem._replace(spatial_shapes=shapes.tolist(), level_start_index=listed)
    elif kind == 1:
        wide = laid_out(rng, shapes.astype(rng.choice(["i1", "u2", "i4", "u8"])))
        problem = problem._replace(spatial_shapes=wide)
    return problem, rng


@st.composite
def mistakes(draw, right):
    """Draw something in the place of an argument that was right; sometimes it is right too."""
    array = right if isinstance(right, np.ndarray) else None
    kind = draw(st.sampled_from(["oddity", "dtype", "axis", "length", "numbers"]))
    if kind == "oddity" or array is None or array.ndim == 0:
        return draw(st.sampled_from(ODDITIES))
    if kind == "dtype":
        dtype = draw(st.sampled_from(DTYPES_OF_OTHERS))
        return np.zeros(array.shape, dtype)
    axis = draw(st.integers(0, array.ndim - 1))
    if kind == "axis":
        return draw(
            st.sampled_from([array[np.newaxis], array.reshape(-1), array[..., :1].swapaxes(axis, -1)])
        )
    if kind == "length":
        index = draw(
            st.sampled_from([slice(1, None), slice(0), [0] * (array.shape[axis] + 1 if array.size else 0)])
        )
        return array[(slice(None),) * axis + (index,)]
    if array.dtype.kind in "iu":
        changed = array.astype(np.int64)
        if changed.size:
            changed.flat[draw(st.integers(0, changed.size - 1))] = draw(
                st.sampled_from([-1, 5, 99, 2**31, 2**62])
            )
        return changed
    return np.full(array.shape, draw(st.sampled_from([np.nan, np.inf, -1e300])))


@st.composite
def calls(draw):
    """Draw a problem, options, and the names of the arguments that may be wrong."""
    problem, rng = draw(problems())
    options = dict(zip(("num_threads", "coordinate_order", "wrt"), draw(OPTIONS), strict=True))
    options |= {"forward_out": None, "backward_out": None}
    if rng.integers(0, 2):
        dtypes = [np.dtype(rng.choice(["f2", "f4", "f8"])) for _ in range(4)]
        outs = [
            laid_out(rng, np.full(array.shape, 7, dtype))
            for dtype, array in zip(dtypes, (problem.grad_output, problem.value, *problem[3:5]), strict=True)
        ]
        options["forward_out"] = outs[0]
        options["backward_out"] = tuple(
            out if name in options["wrt"] and rng.integers(0, 3) else None
            for name, out in zip(GRADIENTS, outs[1:], strict=True)
        )
    suspects = set()
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        named = problem._asdict() | options
        name = draw(st.sampled_from(sorted(named)))
        replaced = draw(mistakes(named[name]))
        suspects.add(name)
        if name in options:
            options[name] = replaced
        else:
            problem = problem._replace(**{name: replaced})
    if suspects:
        suspects.add("out")  # which was right for what others were before
    return problem, options, suspects


def outcome(function, suspects, *args, **options):
    """Return the result of a call, or the error it raises, which must be one that names a suspect."""
    began = time.monotonic()
    try:
        return function(*args, **options)
    except (TypeError, ValueError) as error:
        assert type(error) in (TypeError, ValueError)
        assert any(name in str(error) for name in suspects), error
        assert len(str(error)) < 1000
        return error
    finally:
        assert time.monotonic() - began < 20


def arrays_in(argument):
    entries = argument if isinstance(argument, (tuple, list)) else [argument]
    return [each for each in entries if isinstance(each, np.ndarray)]


def compare(ours, definition, outs):
    """Compare two outcomes; results also with the arrays that they should have been written to."""
    if isinstance(definition, Exception):
        assert str(ours) == str(definition)
        return
    if isinstance(ours, Exception):
        return  # it is about an argument that the reference has not
    if not isinstance(ours, tuple):
        ours, definition, outs = (ours,), (definition,), (outs,)
    for each, expected, out in zip(ours, definition, outs or (None,) * 3, strict=True):
        if expected is None:
            assert each is None
        elif out is None:
            assert_same(each, expected)
        else:
            assert each is out


@given(calls(), st.sampled_from([1, 3, 16384]), st.sampled_from([0, plan.TOUCHES_TO_PACK, 1e9]))
@settings(
    max_examples=int(GIVEN or 300),
    derandomize=GIVEN is None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_call(call, query_block, touches):
    problem, options, suspects = call
    outs = {name: options.pop(name) for name in ("forward_out", "backward_out")}
    before = [array.tobytes() for argument in problem for array in arrays_in(argument)]
    garbage = {name: [array.tobytes() for array in arrays_in(out)] for name, out in outs.items()}
    wrt, num_threads, order = options["wrt"], options["num_threads"], options["coordinate_order"]
    with (
        mock.patch.object(reference, "QUERY_BLOCK", query_block),
        mock.patch.object(plan, "TOUCHES_TO_PACK", touches),
    ):
        ours = outcome(
            msda.forward,
            suspects,
            *problem.inputs,
            out=outs["forward_out"],
            num_threads=num_threads,
            coordinate_order=order,
        )
        definition = outcome(reference.forward, suspects, *problem.inputs, coordinate_order=order)
        compare(ours, definition, outs["forward_out"])
        if isinstance(ours, Exception):
            assert [array.tobytes() for array in arrays_in(outs["forward_out"])] == garbage["forward_out"]

        ours = outcome(
            msda.backward,
            suspects,
            *problem,
            wrt=wrt,
            out=outs["backward_out"],
            num_threads=num_threads,
            coordinate_order=order,
        )
        definition = outcome(reference.backward, suspects, *problem, wrt=wrt, coordinate_order=order)
        compare(ours, definition, outs["backward_out"])
        if isinstance(ours, Exception):
            assert [array.tobytes() for array in arrays_in(outs["backward_out"])] == garbage["backward_out"]
    assert [array.tobytes() for argument in problem for array in arrays_in(argument)] == before
