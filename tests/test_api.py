"""msda.forward and msda.backward as users meet them: arguments, layouts, results; and what users of others met."""

import inspect
import itertools
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import msda
from compare import (
    DTYPES,
    FLOATS,
    Problem,
    assert_same,
    assert_team,
    dtype_of,
    is_plus_zero,
    python,
    random_problem,
    results,
)
from hostile import gaps_intact, hostile, hostile_out
from msda import api, plan, reference, threads

GRADIENTS = msda.Gradients._fields
RESULTS = ("output", *(f"grad_{name}" for name in GRADIENTS))
LEVELS = (((3, 5), (4, 2)), (9, 1), 26)  # out of order, and with gaps

SUBSETS = [names for n in range(4) for names in itertools.combinations(GRADIENTS, n)]
packed_or_not = pytest.mark.parametrize("touches", [0, np.inf], ids=["packed", "in place"])


def make(seed=0, dtypes="float32", **sizes):
    sizes = {"bs": 2, "heads": 3, "channels": 5, "queries": 4, "points": 2} | sizes
    return random_problem(np.random.default_rng(seed), *LEVELS, **sizes, dtypes=dtypes)


def exact(problem):
    """Return the results of the reference before they are rounded to the dtypes of the inputs."""
    arrays = {name: getattr(problem, name) for name in FLOATS}
    compute = np.float64 if any(array.dtype == np.float64 for array in arrays.values()) else np.float32
    return results(
        problem._replace(**{name: array.astype(compute) for name, array in arrays.items()}), reference
    )


def frozen(problem):
    """Return the bytes of all arguments, to see later whether they changed."""
    return [np.asarray(argument).tobytes() for argument in problem]


# ---- results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_new_arrays_of_the_inputs_dtypes(dtype):
    problem = make(dtypes=dtype)
    before = frozen(problem)
    output, gradients = msda.forward(*problem.inputs), msda.backward(*problem)
    assert type(gradients) is msda.Gradients
    assert output.shape == problem.grad_output.shape
    for result in (output, *gradients):
        assert type(result) is np.ndarray
        assert result.dtype == dtype_of(dtype)
        assert result.flags.c_contiguous and result.flags.writeable and result.flags.owndata
        assert not any(np.may_share_memory(result, argument) for argument in problem)
    assert [each.shape for each in gradients] == [getattr(problem, name).shape for name in GRADIENTS]
    assert frozen(problem) == before


@packed_or_not
def test_large_results_begin_with_a_cache_line(touches, plans, used_memory, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = random_problem(
        np.random.default_rng(14), ((30, 30), (9, 8)), heads=8, channels=64, queries=1100, points=4
    )
    found = [msda.forward(*problem.inputs), *msda.backward(*problem)]
    assert [each.packed for each in plans] == [touches == 0] * 2
    assert [result.nbytes >= 2**20 for result in found] == [True, True, False, False]
    assert used_memory
    for result in found:
        assert result.ctypes.data % 64 == 0 or result.nbytes < 2**20
        assert result.flags.c_contiguous and result.flags.writeable and type(result) is np.ndarray
    assert_same(dict(zip(RESULTS, found, strict=True)), results(problem, reference))


@packed_or_not
def test_results_of_4_mib_begin_with_a_huge_page(touches, plans, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = random_problem(
        np.random.default_rng(15), ((32, 64),), heads=8, channels=64, queries=5, points=2
    )
    found = [msda.forward(*problem.inputs), *msda.backward(*problem)]
    assert [each.packed for each in plans] == [touches == 0] * 2
    assert [result.nbytes >= 2**22 for result in found] == [False, True, False, False]
    assert found[1].ctypes.data % 2**21 == 0
    assert found[1].base.nbytes == found[1].nbytes + 2**21
    assert_same(dict(zip(RESULTS, found, strict=True)), results(problem, reference))


@pytest.mark.parametrize(
    "heads, channels, dtype",
    [
        (8, 32, "float32"),
        (8, 16, "float32"),
        (8, 24, "float32"),
        (1, 12, "float32"),
        (8, 8, "float64"),
        (8, 12, "float64"),
        (8, 32, "float16"),
    ],
)
def test_a_large_output_is_the_same_wherever_it_lies(heads, channels, dtype):
    """Whole lines are written past the caches, parts of lines are not; and nothing beside them."""
    dtype = dtype_of(dtype)
    width, line = heads * channels, 64 // dtype.itemsize
    queries = 2**23 // (width * dtype.itemsize) + 5
    problem = random_problem(
        np.random.default_rng(15),
        bs=2,
        heads=heads,
        channels=channels,
        queries=queries,
        points=1,
        dtypes=dtype.name,
    )
    expected = reference.forward(*problem.inputs)
    assert expected.nbytes > 2**24

    def check(out_dtype, step=1, gap=0, gap_in_batch=0, begin=0, backwards=False):
        """Compute into every step-th element, with gaps of elements, `begin` elements after a line's first."""
        out_dtype = np.dtype(out_dtype)
        row = step * width + gap
        element = queries * row + gap_in_batch
        memory = np.full(2 * element * out_dtype.itemsize + 128, 0xA5, np.uint8)
        start = -memory.ctypes.data % 64 + begin * out_dtype.itemsize
        out = np.ndarray((2, element), out_dtype, memory, start)[:, : queries * row].reshape(2, queries, row)
        assert np.may_share_memory(out, memory)
        out = out[:, :: -1 if backwards else 1, : step * width : step]
        assert msda.forward(*problem.inputs, out=out, num_threads=2) is out
        assert_same(out, expected.astype(out_dtype))
        out[...] = np.frombuffer(b"\xa5" * 8, out_dtype)[0]
        assert (memory == 0xA5).all()

    for begin in (0, 1):
        for gap in (0, 1, -width % line, line):
            check(dtype, gap=gap, begin=begin)
        check(dtype, gap_in_batch=1, begin=begin)
        check(dtype, backwards=True, begin=begin)
    for step in (1, 2, 4):
        check(np.float16, step)
        check(dtype.newbyteorder("S"), step)


def test_a_large_output_without_samples():
    problem = random_problem(np.random.default_rng(16), heads=8, channels=32, queries=2**14, points=0)
    for out in (None, np.ones((1, 2**14, 256), np.float32)):
        assert is_plus_zero(msda.forward(*problem.inputs, out=out)).all()


def test_each_gradient_has_the_dtype_of_its_input():
    problem = make(dtypes=("float16", "float32", "float64", "float32"))
    assert msda.forward(*problem.inputs).dtype == np.float16
    assert [gradient.dtype for gradient in msda.backward(*problem)] == [np.float16, np.float32, np.float64]


@pytest.mark.parametrize("name", FLOATS)
def test_results_in_the_machines_byte_order(name):
    problem = make()
    array = getattr(problem, name)
    for result in results(problem._replace(**{name: array.astype(array.dtype.newbyteorder("S"))})).values():
        assert result.dtype.isnative or name != "grad_output"


@packed_or_not
@pytest.mark.parametrize("wrt", SUBSETS)
def test_wrt(wrt, touches, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = make()
    everything = msda.backward(*problem)
    for num_threads in (1, 3):
        chosen = msda.backward(*problem, wrt=wrt, num_threads=num_threads)
        assert [name for name, array in chosen._asdict().items() if array is not None] == list(wrt)
        for name in wrt:
            assert_same(getattr(chosen, name), getattr(everything, name), name)


def test_wrt_takes_one_name_and_any_collection():
    problem = make()
    everything = msda.backward(*problem)
    for wrt in ("attention_weights", ["attention_weights"], {"attention_weights"}):
        chosen = msda.backward(*problem, wrt=wrt)
        assert chosen[:2] == (None, None)
        assert_same(chosen.attention_weights, everything.attention_weights)


def test_coordinate_order():
    problem = make()
    other = problem._replace(sampling_locations=problem.sampling_locations[..., ::-1])
    expected = results(problem)
    computed = results(other, coordinate_order="yx")
    computed["grad_sampling_locations"] = computed["grad_sampling_locations"][..., ::-1]
    assert_same(computed, expected)
    assert_same(results(problem, coordinate_order="xy"), expected)
    out = np.empty_like(problem.sampling_locations)
    gradients = msda.backward(*other, coordinate_order="yx", out=(None, out, None))
    assert gradients.sampling_locations is out
    assert_same(out[..., ::-1], expected["grad_sampling_locations"])


# ---- out= -----------------------------------------------------------------------------------------------


@packed_or_not
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_out_has_any_layout_and_dtype(dtype, out_dtype, touches, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = make(dtypes=dtype)
    before = frozen(problem)
    expected = {
        name: reference.round_to(array, dtype_of(out_dtype)) for name, array in exact(problem).items()
    }
    for label, out in hostile_out(problem.grad_output.shape, dtype_of(out_dtype)):
        assert msda.forward(*problem.inputs, out=out) is out
        assert_same(out, expected["output"], label)
        assert gaps_intact(out), label
    variants = [hostile_out(expected[name].shape, dtype_of(out_dtype)) for name in RESULTS[1:]]
    for labelled in itertools.zip_longest(*variants):
        outs = tuple(None if each is None else each[1] for each in labelled)
        gradients = msda.backward(*problem, out=outs, num_threads=2)
        for name, out, gradient, each in zip(RESULTS[1:], outs, gradients, labelled, strict=True):
            if out is not None:
                assert gradient is out
                assert_same(out, expected[name], f"{name}, {each[0]}")
                assert gaps_intact(out), each[0]
    assert frozen(problem) == before


@pytest.mark.parametrize("number", [np.nan, np.inf, 7.0])
@packed_or_not
def test_out_is_overwritten(touches, number, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    for sizes in ({}, {"queries": 0}, {"points": 0}, {"channels": 0}):
        problem = make(**sizes)
        expected = results(problem, reference)
        output = np.full(expected["output"].shape, number, np.float32)
        outs = tuple(np.full(expected[name].shape, number, np.float32) for name in RESULTS[1:])
        for num_threads in (1, 3, 1):
            msda.forward(*problem.inputs, out=output, num_threads=num_threads)
            msda.backward(*problem, out=outs, num_threads=num_threads)
            assert_same(dict(zip(RESULTS, (output, *outs), strict=True)), expected, sizes)


@pytest.mark.parametrize("given", SUBSETS)
@pytest.mark.parametrize("wrt", SUBSETS)
def test_entries_of_out_may_be_none(wrt, given):
    problem = make()
    outs = {
        name: np.full_like(getattr(problem, name), np.nan) if name in given else None for name in GRADIENTS
    }
    if not set(given) <= set(wrt):
        with pytest.raises(ValueError, match="out"):
            msda.backward(*problem, wrt=wrt, out=tuple(outs.values()))
        assert all(out is None or np.isnan(out).all() for out in outs.values())
        return
    gradients = msda.backward(*problem, wrt=wrt, out=tuple(outs.values()))._asdict()
    expected = reference.backward(*problem, wrt=wrt)._asdict()
    for name in GRADIENTS:
        assert outs[name] is None or gradients[name] is outs[name]
    assert [name for name in GRADIENTS if gradients[name] is None] == [
        name for name in GRADIENTS if name not in wrt
    ]
    assert_same({name: gradients[name] for name in wrt}, {name: expected[name] for name in wrt})


def failing_calls(problem):
    """Yield calls that fail late: everything but the last thing looked at is right."""
    right = {"num_threads": 2}
    yield ValueError, problem, right | {"num_threads": 0}
    yield TypeError, problem, right | {"num_threads": 1.5}
    yield ValueError, problem, right | {"coordinate_order": "zz"}
    yield ValueError, problem._replace(level_start_index=(9, 19)), right
    yield ValueError, problem._replace(attention_weights=problem.attention_weights[:, 1:]), right
    yield TypeError, problem._replace(value=problem.value.astype(int)), right


def test_a_failed_call_leaves_out_untouched(monkeypatch):
    problem = make()
    output = np.full(problem.grad_output.shape, 7, np.float32)
    outs = [np.full(getattr(problem, name).shape, 7, np.float32) for name in GRADIENTS]

    def untouched():
        return all((each == 7).all() for each in (output, *outs))

    for error, wrong, options in failing_calls(problem):
        with pytest.raises(error):
            msda.forward(*wrong.inputs, out=output, **options)
        with pytest.raises(error):
            msda.backward(*wrong, out=tuple(outs), **options)
        assert untouched(), options
    for wrong in (
        problem._replace(grad_output=problem.grad_output[..., 1:]),
        problem._replace(grad_output="x"),
    ):
        with pytest.raises((TypeError, ValueError)):
            msda.backward(*wrong, out=tuple(outs))
        assert untouched()
    read_only = outs[2].copy()
    read_only.flags.writeable = False
    for last in (outs[2][..., :1], outs[2].astype(int), read_only, outs[0], problem.attention_weights, "x"):
        with pytest.raises((TypeError, ValueError), match=r"out\[2\]"):
            msda.backward(*problem, out=(*outs[:2], last))
        assert untouched()
    with pytest.raises(ValueError, match="wrt"):
        msda.backward(*problem, out=tuple(outs), wrt=("value", "values"))

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr(api, "np", SimpleNamespace(empty=no_memory, zeros=no_memory, uint8=np.uint8))
    with pytest.raises(MemoryError):
        msda.forward(*problem.inputs, out=output)
    with pytest.raises(MemoryError):
        msda.backward(*problem, out=tuple(outs))
    assert untouched()


HUGE = 2**40
EMPTY = {
    "batch": (HUGE, 0, 1, 4, 0, 2),
    "keys": (1, HUGE, 1, 0, 3, 2),
    "heads": (1, 0, HUGE, 0, 0, 2),
    "channels": (1, 0, 1, HUGE, 0, 2),
    "queries": (1, 4, 1, 0, HUGE, 0),
    "points": (1, 4, 1, 3, 0, HUGE),
}
CALL_OF_SIZES = """
import sys
import numpy as np
import msda

bs, keys, heads, channels, queries, points = map(int, sys.argv[1:])
value = np.zeros((bs, keys, heads, channels))
locations = np.zeros((bs, queries, heads, 1, points, 2))
grad_output = np.zeros((bs, queries, heads * channels))
inputs = (value, [(1, keys)], None, locations, locations[..., 0])
assert msda.forward(*inputs).shape == grad_output.shape
assert not any(gradient.any() for gradient in msda.backward(*inputs, grad_output))
"""


@pytest.mark.parametrize("axis", EMPTY)
def test_huge_axes_of_empty_arrays(axis):
    """There is nothing to do, so it takes neither time nor memory."""
    python(CALL_OF_SIZES, *map(str, EMPTY[axis]), timeout=20)


# ---- threads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)]
)
@pytest.mark.parametrize("bs", [0, 2])
def test_wrong_num_threads(wrong, error, bs):
    problem = make(bs=bs)
    for call in (
        lambda: msda.forward(*problem.inputs, num_threads=wrong),
        lambda: msda.backward(*problem, num_threads=wrong),
        lambda: msda.backward(*problem, num_threads=wrong, wrt=()),
    ):
        with pytest.raises(error, match="num_threads"):
            call()


def test_num_threads_is_obeyed_up_to_the_items(plans):
    problem = make()
    for num_threads in (1, 2, 3, 7, 64, np.int8(3)):
        msda.forward(*problem.inputs, num_threads=num_threads)
        assert_team(plans[-1], min(num_threads, plans[-1].items))
        msda.backward(*problem, num_threads=num_threads)
        assert_team(plans[-1], min(num_threads, plans[-1].items))


def test_a_small_call_stays_on_one_thread_by_default(monkeypatch):
    monkeypatch.setattr(threads, "_set_by_user", 3)
    problem = make()
    msda.backward(*problem)
    assert threads.last_team() == 1
    monkeypatch.setattr(threads, "SMALL_WORK", 1)
    msda.backward(*problem)
    assert threads.last_team() == (3 if threads._system.openmp() else 1)


# ---- layouts --------------------------------------------------------------------------------------------


@packed_or_not
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout_of_an_input(dtype, name, touches, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = make(dtypes=dtype)
    expected = results(problem)
    for label, variant in hostile(getattr(problem, name)):
        given = problem._replace(**{name: variant})
        before = variant.tobytes()
        assert_same(results(given, num_threads=2), expected, label)
        assert_same(results(given, reference), expected, label)
        assert variant.tobytes() == before, label


@pytest.mark.parametrize("name", FLOATS)
def test_broadcast_inputs(name):
    for axis in range(getattr(make(), name).ndim):
        problem = make()
        array = getattr(problem, name)
        array[...] = array.take([0], axis=axis)
        expected = results(problem)
        labels = []
        for label, variant in hostile(array):
            if "broadcast" in label:
                labels.append(label)
                assert_same(results(problem._replace(**{name: variant})), expected, label)
        assert f"axis {axis} broadcast" in labels


def test_all_layouts_at_once():
    for dtype in DTYPES:
        problem = make(dtypes=dtype)
        expected = results(problem)
        variants = {name: list(hostile(getattr(problem, name))) for name in FLOATS}
        for k in range(30):
            steps = zip(variants.items(), (1, 3, 5, 7), strict=True)
            chosen = {name: each[(k * step) % len(each)] for (name, each), step in steps}
            given = problem._replace(**{name: variant for name, (_, variant) in chosen.items()})
            assert_same(results(given, num_threads=3), expected, [label for label, _ in chosen.values()])


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("name", ["spatial_shapes", "level_start_index"])
def test_any_layout_of_the_levels(name, dtype):
    problem = make()
    expected = results(problem)
    for label, variant in hostile(np.asarray(getattr(problem, name)).astype(dtype)):
        given = problem._replace(**{name: variant})
        assert_same(results(given), expected, label)
        assert_same(results(given, reference), expected, label)


class WithArray:
    def __init__(self, held):
        self._held = held

    def __array__(self, dtype=None, copy=None):
        return self._held


class WithDLPack:
    def __init__(self, held):
        self.__dlpack__ = held.__dlpack__
        self.__dlpack_device__ = held.__dlpack_device__


@pytest.mark.parametrize("provide", [WithArray, WithDLPack, memoryview, lambda held: held.tolist()])
def test_providers(provide):
    problem = make(dtypes="float64")
    expected = results(problem)
    for k, argument in enumerate(problem):
        given = list(problem)
        given[k] = provide(np.asarray(argument))
        assert_same(results(Problem(*given)), expected, Problem._fields[k])
    assert_same(results(Problem(*map(provide, map(np.asarray, problem)))), expected)


# ---- what users of other implementations ran into -------------------------------------------------------


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e38, -1e38, 3e9, -3e9])
def test_coordinates_that_are_no_numbers_or_huge(odd):
    """Others converted them to integers first: not a number came out, or the process ended."""
    problem = make()
    for axis in (0, 1):
        locations = problem.sampling_locations.copy()
        locations[..., axis] = odd
        for array in results(problem._replace(sampling_locations=locations)).values():
            assert is_plus_zero(array).all()


def test_levels_with_or_without_starts_as_lists_or_arrays():
    problem = random_problem(np.random.default_rng(1))
    expected = results(problem)
    for shapes in (
        [(3, 5), (4, 2)],
        ((3, 5), (4, 2)),
        [[3, 5], [4, 2]],
        np.array([(3, 5), (4, 2)], np.int32),
    ):
        for starts in (
            None,
            [0, 15],
            (0, 15),
            np.array([0, 15]),
            np.array([0, 15], np.uint8),
            [np.int64(0), 15],
        ):
            given = problem._replace(spatial_shapes=shapes, level_start_index=starts)
            assert_same(results(given), expected)
            assert_same(results(given, reference), expected)


def test_one_signature():
    forward, backward = (inspect.signature(function).parameters for function in (msda.forward, msda.backward))
    positional = [name for name, each in backward.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == Problem._fields
    assert [name for name, each in forward.items() if each.kind is each.POSITIONAL_OR_KEYWORD] == positional[
        :-1
    ]
    for ours, definition in ((forward, reference.forward), (backward, reference.backward)):
        for name, each in inspect.signature(definition).parameters.items():
            assert (each.kind, each.default) == (ours[name].kind, ours[name].default)
    problem = make()
    named = problem._asdict()
    assert_same(msda.backward(**named)._asdict(), msda.backward(*problem)._asdict())
    del named["grad_output"]
    assert_same(msda.forward(**named), msda.forward(*problem.inputs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_beside_any_other(dtype):
    for others in DTYPES:
        for place in range(4):
            dtypes = [others] * 4
            dtypes[place] = dtype
            problem = make(dtypes=dtypes)
            wide = exact(problem)
            for name, array in results(problem).items():
                assert_same(array, reference.round_to(wide[name], array.dtype), (dtypes, name))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_positions_are_exact(dtype):
    """Computed in float16, positions on a map 1000 pixels wide would be off by half a pixel."""
    problem = random_problem(
        np.random.default_rng(2), ((70, 1000),), channels=8, queries=200, points=4, dtypes=dtype
    )
    double = problem._replace(**{name: getattr(problem, name).astype(np.float64) for name in FLOATS})
    expected = results(double)
    step = 2.0**-9 if dtype == "bfloat16" else 2.0**-12  # half the distance between neighbours near 1
    for name, array in results(problem).items():
        error = np.linalg.norm(array.astype(np.float64) - expected[name]) / np.linalg.norm(expected[name])
        assert error < step, name


def test_positions_at_pixel_centres_lose_nothing():
    """A detour by 2*x - 1 loses the last bits there, and with them the pixel."""
    for width in (3, 10, 100, 167, 1333):
        centres = ((np.arange(width) + 0.5) / width).astype(np.float32)
        value = np.random.default_rng(3).standard_normal((1, width, 1, 1)).astype(np.float32)
        problem = Problem(
            value,
            [(1, width)],
            None,
            np.stack([centres, np.full_like(centres, 0.5)], axis=-1).reshape(1, width, 1, 1, 1, 2),
            np.ones((1, width, 1, 1, 1), np.float32),
            np.ones((1, width, 1), np.float32),
        )
        double = problem._replace(**{name: getattr(problem, name).astype(np.float64) for name in FLOATS})
        expected = results(double)
        computed = results(problem)
        assert np.abs(computed["output"] - value[:, :, 0]).max() < 1e-3 * width / 1000
        for name in ("output", "grad_value", "grad_attention_weights"):
            error = np.linalg.norm(computed[name] - expected[name]) / np.linalg.norm(expected[name])
            assert error < 1e-7, name


@pytest.mark.parametrize("height, width", [(2, 5), (5, 2), (1, 7), (7, 1)])
def test_width_belongs_to_x_and_height_to_y(height, width):
    for row, column in np.ndindex(height, width):
        value = np.zeros((1, height * width, 1, 1))
        value[0, row * width + column] = 1
        here = np.array([(column + 0.5) / width, (row + 0.5) / height]).reshape(1, 1, 1, 1, 1, 2)
        one = np.ones((1, 1, 1, 1, 1))
        problem = Problem(value, [(height, width)], None, here, one, np.ones((1, 1, 1)))
        assert msda.forward(*problem.inputs).item() == pytest.approx(1)
        # A quarter of a pixel to the right and a quarter down, the sample grows by width for each x, height for y.
        there = here - np.array([0.25 / width, 0.25 / height])
        gradient = msda.backward(*problem._replace(sampling_locations=there)).sampling_locations.ravel()
        assert gradient == pytest.approx([0.75 * width, 0.75 * height])


@pytest.mark.parametrize("num_keys", [22, 24])
def test_sizes_that_do_not_add_up_are_told_with_both_numbers(num_keys):
    problem = random_problem(np.random.default_rng(4), num_keys=num_keys)
    for call in (lambda: msda.forward(*problem.inputs), lambda: msda.backward(*problem)):
        with pytest.raises(ValueError, match=rf"\b23\b.*num_keys.*\b{num_keys}\b"):
            call()


@pytest.mark.parametrize(
    "shapes, starts",
    [
        ([(3, 5), (4, 2)], [0, 16]),
        ([(3, 5), (4, 2)], [-1, 15]),
        ([(3, 8), (4, 2)], [0, 15]),
        ([(3, 5), (4, -2)], [0, 15]),
        ([(2**32, 2**32), (4, 2)], [0, 15]),
        ([(2**31, 2**33), (4, 2)], [0, 15]),
        ([(3, 5), (4, 2)], [2**62, 15]),
        ([(3, 5), (2**62, 0)], [0, 24]),
    ],
)
def test_levels_outside_value_are_refused(shapes, starts):
    problem = random_problem(np.random.default_rng(5))._replace(
        spatial_shapes=shapes, level_start_index=starts
    )
    for call in (lambda: msda.forward(*problem.inputs), lambda: msda.backward(*problem)):
        with pytest.raises(ValueError, match=r"level|spatial_shapes"):
            call()


def test_huge_sides_of_levels_without_pixels():
    problem = random_problem(np.random.default_rng(6), ((3, 5), (4, 2), (1, 1)))
    for side in ((2**63 - 1, 0), (0, 2**63 - 1)):
        given = problem._replace(spatial_shapes=[(3, 5), (4, 2), side], level_start_index=[0, 15, 24])
        computed = results(given)
        assert_same(computed, results(given, reference))
        assert is_plus_zero(computed["grad_attention_weights"][..., 2, :]).all()


@pytest.mark.parametrize("bs", [1, 2, 3, 7, 65])
def test_any_batch(bs):
    """Others want it to be divisible by a step."""
    problem = make(bs=bs)
    expected = results(problem, reference)
    assert_same(results(problem, num_threads=2), expected)


def test_any_number_of_points_levels_and_heads():
    rng = np.random.default_rng(7)
    for points, levels, heads in ((1, 1, 1), (3, 5, 7), (17, 2, 1), (5, 17, 33), (2, 1, 64)):
        shapes = rng.integers(1, 5, (levels, 2))
        problem = random_problem(rng, shapes, heads=heads, points=points, queries=3)
        assert_same(results(problem, num_threads=2), results(problem, reference), (points, levels, heads))


def test_errors_are_raised_and_nothing_is_printed(capfd):
    for error, wrong, options in failing_calls(make()):
        with pytest.raises(error):
            msda.backward(*wrong, **options)
    results(make(), num_threads=2)
    assert capfd.readouterr() == ("", "")


def peak(call):
    """Return the most memory that a call holds beside what there was before, its results included."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_few_samples_on_a_large_map_cost_nothing_without_the_gradient_of_value():
    value = np.zeros((1, 2**20, 1, 4), np.float32)
    problem = random_problem(np.random.default_rng(8), channels=4)._replace(
        value=value, spatial_shapes=[(2**10, 2**9), (2**9, 2**10)]
    )
    for wrt in ((), GRADIENTS[1:], GRADIENTS[1:2]):
        assert peak(lambda wrt=wrt: msda.backward(*problem, wrt=wrt, num_threads=2)) < 2**18
    assert peak(lambda: msda.forward(*problem.inputs, num_threads=2)) < 2**18


def test_nothing_is_kept_for_each_sample():
    """Framework versions of the operator keep several times queries * points * channels numbers."""
    problem = random_problem(np.random.default_rng(9), channels=32, queries=3000, points=8)
    outputs = problem.grad_output.nbytes
    gradients = sum(getattr(problem, name).nbytes for name in GRADIENTS)
    assert peak(lambda: msda.forward(*problem.inputs, num_threads=2)) < outputs + 2**18
    assert peak(lambda: msda.backward(*problem, num_threads=2)) < gradients + 2**18


@pytest.mark.parametrize("channels", [1025, 2048, 3096])
def test_many_channels_in_little_memory(channels):
    problem = random_problem(np.random.default_rng(10), channels=channels, queries=50, points=4)
    gradients = sum(getattr(problem, name).nbytes for name in GRADIENTS)
    # A head's rows and their gradient for each thread, and some rows more.
    assert peak(lambda: msda.backward(*problem, num_threads=1)) < gradients + 3 * problem.value.nbytes + 2**18


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_encoder_of_two_byte_numbers_needs_little_memory(dtype):
    """Numbers are widened where they are read, not by a copy of a whole array."""
    shapes = np.array([(100, 167), (50, 84), (25, 42), (13, 21)])
    num_keys = int(shapes.prod(axis=1).sum())
    locations = np.random.default_rng(11).random((1, num_keys, 1, 1, 4, 2)).astype(dtype_of(dtype))
    problem = Problem(
        np.ones((1, num_keys, 8, 32), dtype_of(dtype)),
        shapes,
        None,
        np.broadcast_to(locations, (1, num_keys, 8, 4, 4, 2)),
        np.ones((1, num_keys, 8, 4, 4), dtype_of(dtype)),
        np.ones((1, num_keys, 256), dtype_of(dtype)),
    )
    gradients = sum(getattr(problem, name).nbytes for name in GRADIENTS)
    assert peak(lambda: msda.forward(*problem.inputs, num_threads=2)) - problem.grad_output.nbytes < 2**26
    assert peak(lambda: msda.backward(*problem, num_threads=2)) - gradients < 2**26


# ---- more than 2**31 elements ---------------------------------------------------------------------------

KEYS = 2**20 + 64  # times 32 heads times 64 channels: the last 64 rows lie beyond element 2**31


def memory_available():
    """Return how many bytes this process can still use, as far as the system tells."""
    amounts = []
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    if found:
        amounts.append(1024 * int(found[1]))
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and limit.read_text().strip() != "max":
        amounts.append(int(limit.read_text()) - int(used.read_text()))
    return min(amounts, default=0)


def require_memory(needed):
    if not Path("/proc/meminfo").exists():
        pytest.skip("cannot tell how much memory is available")
    if memory_available() < needed:
        pytest.skip(
            f"needs {needed / 2**30:.0f} GiB of memory, {memory_available() / 2**30:.1f} are available"
        )


def far_and_near(dtype):
    """Return a problem on the first 16 keys and the last 64 of KEYS; and the same on a value of 80 keys."""
    near = random_problem(
        np.random.default_rng(12), ((8, 8), (4, 4)), heads=32, channels=64, queries=3, points=3, dtypes=dtype
    )
    return near._replace(level_start_index=(KEYS - 64, 0)), near._replace(level_start_index=(16, 0))


def assert_far_end(gradient, expected):
    assert_same(gradient[:, :16], expected[:, :16])
    assert_same(gradient[:, -64:], expected[:, -64:])
    between = gradient[0, 16:-64].reshape(-1)
    for begin in range(0, between.size, 2**24):
        assert not between[begin : begin + 2**24].view(np.uint64).any()


def test_more_than_2_to_the_31_elements(plans):
    """Offsets of elements do not fit in 32 bits there, nor those of bytes."""
    require_memory(11 * 2**30)
    problem, small = far_and_near("float16")
    pattern = np.random.default_rng(13).integers(0, 0x7000, 2**20 + 1, np.uint16)  # finite numbers, all >= 0
    value = np.empty((1, KEYS, 32, 64), np.float16)
    assert value.size > 2**31
    flat = value.reshape(-1).view(np.uint16)
    for begin in range(0, flat.size, pattern.size):
        flat[begin : begin + pattern.size] = pattern[: flat.size - begin]
    value[:, :16] = small.value[:, :16]
    value[:, -64:] = small.value[:, -64:]
    problem = problem._replace(value=value)
    expected = results(small, reference)
    assert_same(msda.forward(*problem.inputs, num_threads=2), expected["output"])
    assert plans[-1].packed
    gradients = msda.backward(*problem, num_threads=2)
    assert plans[-1].packed
    assert_same(gradients.sampling_locations, expected["grad_sampling_locations"])
    assert_same(gradients.attention_weights, expected["grad_attention_weights"])
    assert_far_end(gradients.value, expected["grad_value"])


def test_more_than_2_to_the_31_elements_touched_in_place(plans):
    """The same where rows are touched in the caller's arrays; pages that nobody touches need no memory."""
    require_memory(4 * 2**30)
    problem, small = far_and_near("float32")
    try:
        value = np.zeros((1, KEYS, 32, 64), np.float32)
        gradient = np.zeros((1, KEYS, 32, 64), np.float32)
    except MemoryError:
        pytest.skip("needs 17 GiB of address space")
    del gradient
    value[:, :16] = small.value[:, :16]
    value[:, -64:] = small.value[:, -64:]
    problem = problem._replace(value=value)
    expected = results(small, reference)
    computed = results(problem, num_threads=2)
    assert not plans[-1].packed
    assert_far_end(computed.pop("grad_value"), expected.pop("grad_value"))
    assert_same(computed, expected)


def test_an_axis_of_one_key_may_have_any_stride():
    """Its stride leads nowhere, but would lead far outside."""
    value = np.ones((4, 5, 1, 4), np.float32)[::2, :: 2**49]
    rest = (
        [(1, 1)],
        None,
        np.full((2, 1, 1, 1, 1, 2), 0.1, np.float32),
        np.ones((2, 1, 1, 1, 1), np.float32),
    )
    grad_output = np.ones((2, 1, 4), np.float32)
    plain = np.ascontiguousarray(value)
    assert_same(msda.forward(value, *rest), msda.forward(plain, *rest), "forward")
    expected = msda.backward(plain, *rest, grad_output)
    assert_same(msda.backward(value, *rest, grad_output).value, expected.value, "backward")
    assert_same(
        msda.backward(plain, *rest, grad_output, out=(value, None, None)).value, expected.value, "out"
    )


@pytest.mark.parametrize(("keys", "queries"), [(2**60, 1), (2**40, 16385)])
def test_rows_without_channels_take_no_time(keys, queries):
    value = np.empty((1, keys, 1, 0), np.float32)
    locations = np.full((1, queries, 1, 1, 1, 2), 0.5, np.float32)
    inputs = (value, [(2**20, keys // 2**20)], None, locations, locations[..., 0])
    grad_output = np.empty((1, queries, 0), np.float32)
    gradients = msda.backward(*inputs, grad_output, out=(np.empty_like(value), None, None))
    assert not gradients.sampling_locations.any() and not gradients.attention_weights.any()
