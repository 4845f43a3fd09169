import array as array_module
import itertools
import re
import sys
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import hostile
from msda import arguments, plan

SHAPES = [(3, 5), (2, 2)]
STARTS = [0, 15]
BS, KEYS, HEADS, CHANNELS, QUERIES, POINTS = 2, 19, 3, 4, 6, 7
FLOATS = {
    "value": (BS, KEYS, HEADS, CHANNELS),
    "sampling_locations": (BS, QUERIES, HEADS, len(SHAPES), POINTS, 2),
    "attention_weights": (BS, QUERIES, HEADS, len(SHAPES), POINTS),
    "grad_output": (BS, QUERIES, HEADS * CHANNELS),
}
GRADIENTS = list(FLOATS)[:3]
ALL = (True, True, True)


def float_dtype(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def numbers(shape, dtype="float32"):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)


def well_formed(dtype="float32", **changes):
    """Return the arguments of a call that is right, with some of them replaced."""
    call = {
        "spatial_shapes": np.array(SHAPES),
        "level_start_index": np.array(STARTS),
        "coordinate_order": "xy",
        **{name: numbers(shape, dtype) for name, shape in FLOATS.items()},
    }
    assert set(changes) <= set(call)
    return call | changes


def check(call):
    return arguments.backward_inputs(**call)


def refused(exception, fragments, function, *args, **kwargs):
    """Assert that a call raises exactly this, with a message that has all the fragments in it."""
    with pytest.raises(exception) as caught:
        function(*args, **kwargs)
    assert caught.type is exception
    for fragment in fragments:
        assert fragment in str(caught.value)
    return caught.value


def refused_call(exception, fragments, **changes):
    """Assert that both directions refuse the same call in the same words."""
    call = well_formed(**changes)
    error = refused(exception, fragments, check, call)
    if "grad_output" not in changes:
        grad_output = call.pop("grad_output")
        assert str(refused(exception, fragments, arguments.forward_inputs, **call)) == str(error)
        assert grad_output.tobytes() == well_formed()["grad_output"].tobytes()
    return error


# What is accepted


def test_a_right_call_comes_out_as_the_kernels_want_it():
    call = well_formed()
    inputs = check(call)
    for name in GRADIENTS:
        checked = getattr(inputs, name)
        assert type(checked) is np.ndarray
        assert checked.shape == FLOATS[name] and checked.strides == call[name].strides
        assert np.shares_memory(checked, call[name]) and checked is not call[name]
    assert inputs.grad_output.shape == (BS, QUERIES, HEADS, CHANNELS)
    assert np.shares_memory(inputs.grad_output, call["grad_output"])
    assert inputs.grad_output.tobytes() == call["grad_output"].tobytes()
    assert inputs.shapes.levels.dtype == np.int64 and inputs.shapes.levels.flags.c_contiguous
    assert inputs.shapes.levels.tolist() == [[3, 5, 0], [2, 2, 15]]
    assert inputs.compute == np.float32

    del call["grad_output"]
    forward = arguments.forward_inputs(**call)
    assert forward.grad_output is None
    assert forward.shapes.levels.tolist() == inputs.shapes.levels.tolist()


@pytest.mark.parametrize("order", ["xy", "yx", np.str_("yx")])
def test_locations_come_out_in_xy_order(order):
    call = well_formed(coordinate_order=order)
    locations = call["sampling_locations"]
    checked = check(call).sampling_locations
    assert checked.tobytes() == (locations if order == "xy" else locations[..., ::-1]).tobytes()
    assert np.shares_memory(checked, locations)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_any_layout_is_taken_where_it_lies_and_left_as_it_was(name, dtype):
    for label, variant in hostile.hostile(numbers(FLOATS[name], float_dtype(dtype))):
        call = well_formed(**{name: variant})
        before = variant.tobytes()
        checked = getattr(check(call), name)
        assert np.shares_memory(checked, variant), label
        assert checked.dtype == variant.dtype, label
        assert arguments.dtype_name(checked.dtype) == dtype, label
        assert checked.tobytes() == before == variant.tobytes(), label


@pytest.mark.parametrize("double", [None, *FLOATS])
def test_one_float64_makes_the_arithmetic_float64(double):
    call = well_formed(dtype="float16")
    if double:
        call[double] = call[double].astype(">f8")
    assert check(call).compute == (np.float64 if double else np.float32)
    del call["grad_output"]
    expected = np.float32 if double in (None, "grad_output") else np.float64
    assert arguments.forward_inputs(**call).compute == expected


def test_each_float_array_has_its_own_dtype():
    dtypes = dict(zip(FLOATS, ["<f2", ">f4", ">f8", "<f4"], strict=True))
    inputs = check(well_formed(**{name: numbers(FLOATS[name], dtype) for name, dtype in dtypes.items()}))
    assert [getattr(inputs, name).dtype for name in FLOATS] == list(dtypes.values())


INTEGERS = ["i1", "u1", "<i2", ">i2", "<u4", ">i4", "<i8", ">i8", "<u8", ">u8"]


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(
    "convert",
    [
        *(pytest.param(lambda a, t=t: np.array(a, dtype=t), id=t) for t in INTEGERS),
        pytest.param(lambda a: a, id="list"),
        pytest.param(lambda a: tuple(tuple(r) if isinstance(r, tuple) else r for r in a), id="tuple"),
        pytest.param(lambda a: [np.array(r, dtype=np.uint64) for r in a], id="list of arrays"),
        pytest.param(lambda a: np.array(a)[::-1].copy()[::-1], id="reversed"),
        pytest.param(lambda a: np.asfortranarray(np.array(a)), id="Fortran"),
        pytest.param(lambda a: memoryview(np.array(a)), id="memoryview"),
        pytest.param(lambda a: np.array(a).view(np.memmap), id="memmap"),
        pytest.param(lambda a: DLPackOnly(np.array(a)), id="DLPack"),
    ],
)
def test_levels_come_as_any_integers(convert, starts):
    call = well_formed(spatial_shapes=convert(SHAPES), level_start_index=convert(STARTS) if starts else None)
    assert check(call).shapes.levels.tolist() == [[3, 5, 0], [2, 2, 15]]


def test_levels_are_a_copy():
    call = well_formed()
    levels = check(call).shapes.levels
    for name in ("spatial_shapes", "level_start_index"):
        assert not np.shares_memory(levels, call[name])
        call[name][...] = -1
    assert levels.tolist() == [[3, 5, 0], [2, 2, 15]]


@pytest.mark.parametrize(
    ("shapes", "starts"),
    [
        pytest.param([(3, 5), (2, 2)], [4, 0], id="reordered"),
        pytest.param([(3, 5), (3, 5)], [0, 4], id="overlapping"),
        pytest.param([(1, 1), (2, 2)], [9, 1], id="gaps"),
        pytest.param([(19, 1), (1, 19)], [0, 0], id="the same keys"),
        pytest.param([(0, 5), (5, 0)], [19, 0], id="no pixels, one at the very end"),
        pytest.param([(2**63 - 1, 0), (0, 2**63 - 1)], [0, 19], id="no pixels, but huge"),
    ],
)
def test_levels_may_lie_anywhere_in_value(shapes, starts):
    levels = check(well_formed(spatial_shapes=shapes, level_start_index=starts)).shapes.levels
    assert levels.tolist() == [[h, w, start] for (h, w), start in zip(shapes, starts, strict=True)]


@pytest.mark.parametrize("shapes", [[], (), np.empty((0, 2), int)])
@pytest.mark.parametrize("starts", [[], (), np.empty(0, int), None])
def test_no_levels(shapes, starts):
    locations, weights = np.zeros((BS, QUERIES, HEADS, 0, 4, 2)), np.zeros((BS, QUERIES, HEADS, 0, 4))
    call = well_formed(
        spatial_shapes=shapes,
        level_start_index=starts,
        sampling_locations=locations,
        attention_weights=weights,
    )
    if starts is None:
        refused(ValueError, ["add up to 0", "num_keys (axis 1 of value) is 19"], check, call)
        call["value"] = call["value"][:, :0]
    assert check(call).shapes.levels.shape == (0, 3)


@pytest.mark.parametrize("empty", ["bs", "keys", "heads", "channels", "queries", "points"])
def test_any_axis_may_be_empty(empty):
    n = {"bs": 2, "keys": 19, "heads": 3, "channels": 4, "queries": 6, "points": 7} | {empty: 0}
    shapes = SHAPES if n["keys"] else [(0, 5), (2, 0)]
    inputs = check(
        {
            "value": np.zeros((n["bs"], n["keys"], n["heads"], n["channels"])),
            "spatial_shapes": shapes,
            "level_start_index": None,
            "sampling_locations": np.zeros((n["bs"], n["queries"], n["heads"], 2, n["points"], 2)),
            "attention_weights": np.zeros((n["bs"], n["queries"], n["heads"], 2, n["points"])),
            "grad_output": np.zeros((n["bs"], n["queries"], n["heads"] * n["channels"])),
            "coordinate_order": "yx",
        }
    )
    assert inputs.grad_output.shape == (n["bs"], n["queries"], n["heads"], n["channels"])
    assert inputs.sampling_locations.shape == (n["bs"], n["queries"], n["heads"], 2, n["points"], 2)


@given(data=st.data())
@settings(deadline=None)
def test_grad_output_is_parted_into_heads_without_a_copy(data):
    bs, queries, heads, channels = (data.draw(st.integers(1, 3)) for _ in range(4))
    base = numbers((3 * bs, 3 * queries, 3 * heads * channels))
    step = st.sampled_from([-3, -2, -1, 1, 2, 3])
    cut = tuple(slice(None, None, data.draw(step)) for _ in range(3))
    grad_output = base[cut][:bs, :queries, : heads * channels]
    checked = check(
        {
            "value": np.zeros((bs, 0, heads, channels)),
            "spatial_shapes": [],
            "level_start_index": None,
            "sampling_locations": np.zeros((bs, queries, heads, 0, 0, 2)),
            "attention_weights": np.zeros((bs, queries, heads, 0, 0)),
            "grad_output": grad_output,
            "coordinate_order": "xy",
        }
    ).grad_output
    assert np.may_share_memory(checked, base) and checked.base is not None
    assert checked.__array_interface__["data"] == grad_output.__array_interface__["data"]
    for head in range(heads):
        part = grad_output[..., head * channels : (head + 1) * channels]
        assert np.array_equal(checked[:, :, head], part)


def test_the_checked_arrays_keep_their_shape_when_the_caller_changes_his():
    call = well_formed()
    inputs = check(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer NumPy frowns on it, but lets it happen
        for name in FLOATS:
            call[name].shape = (-1,)
    assert [getattr(inputs, name).shape for name in GRADIENTS] == [FLOATS[name] for name in GRADIENTS]


# Providers of arrays


class ArrayProvider:
    def __init__(self, result):
        self.result = result

    def __array__(self, dtype=None, copy=None):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class DLPackOnly:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnAnotherDevice:
    def __dlpack__(self, **options):
        raise BufferError("cannot export to the CPU")

    def __dlpack_device__(self):
        return (2, 0)


class Treacherous:
    """Raises whenever it is looked at."""

    def __getattr__(self, name):
        raise ZeroDivisionError(f"no {name} today")


PROVIDERS = {
    "__array__": ArrayProvider,
    "DLPack": DLPackOnly,
    "memoryview": memoryview,
    "memmap": lambda array: array.view(np.memmap),
    "recarray": lambda array: array.view(np.recarray),
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_providers_are_read_in_place(name, provider):
    array = numbers(FLOATS[name])
    checked = getattr(check(well_formed(**{name: PROVIDERS[provider](array)})), name)
    assert type(checked) is np.ndarray and checked is not array
    assert np.shares_memory(checked, array)
    assert checked.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", FLOATS)
def test_lists_of_floats_are_float64(name):
    array = numbers(FLOATS[name])
    inputs = check(well_formed(**{name: array.tolist()}))
    assert getattr(inputs, name).dtype == np.float64 == inputs.compute
    assert getattr(inputs, name).tobytes() == array.astype(np.float64).tobytes()


def test_a_list_of_arrays_keeps_their_dtype():
    value = numbers(FLOATS["value"], "float16")
    assert check(well_formed(value=list(value))).value.dtype == np.float16


RAISED = RuntimeError("call detach() first, it requires grad")
REFUSING = {
    "requires grad": (lambda: ArrayProvider(RAISED), "RuntimeError: call detach() first", RuntimeError),
    "on a device": (OnAnotherDevice, "", Exception),
    "not an array": (lambda: ArrayProvider("no array"), "", ValueError),
    "ragged list": (lambda: [[1.0, 2.0], [3.0]], "", ValueError),
    "list within itself": (lambda: list_within_itself(), "", Exception),
    "attribute error": (Treacherous, "ZeroDivisionError: no __", ZeroDivisionError),
}


def list_within_itself():
    result = []
    result.append(result)
    return result


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(FLOATS, REFUSING),
        # Lists of integers are read element by element.
        *itertools.product(["spatial_shapes", "level_start_index"], [k for k in REFUSING if "list" not in k]),
    ],
)
def test_a_provider_that_refuses_is_a_type_error_with_its_cause(name, kind):
    make, message, cause = REFUSING[kind]
    error = refused_call(TypeError, [f"{name} must be an array, got ", message], **{name: make()})
    assert isinstance(error.__cause__, cause)


@pytest.mark.parametrize("name", [*FLOATS, "spatial_shapes", "level_start_index"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError, SystemExit])
def test_what_stops_a_program_passes_through(name, stop):
    refused(stop, [], check, well_formed(**{name: ArrayProvider(stop())}))


# One argument by itself

ACCEPTED = "must be a float16, bfloat16, float32 or float64 array, got "
WRONG_FLOATS = {
    "int64": (lambda a: a.astype(np.int64), "dtype int64; convert it first, with astype"),
    "uint16": (lambda a: a.astype(np.uint16), "dtype uint16; convert it first, with astype"),
    "bool": (lambda a: a > 3, "dtype bool; convert it first, with astype"),
    "complex": (lambda a: a.astype(complex), "dtype complex128"),
    "longdouble": (lambda a: a.astype(np.longdouble), f"dtype {np.dtype(np.longdouble)}; convert it"),
    "object": (lambda a: a.astype(object), "dtype object"),
    "str": (lambda a: a.astype(str), "dtype <U"),
    "bytes": (lambda a: a.astype("S4"), "dtype |S4"),
    "datetime": (lambda a: a.astype("M8[s]"), "dtype datetime64[s]"),
    "void of two bytes": (lambda a: a.astype("f2").view("V2"), "dtype |V2"),
    "record": (lambda a: a.view([("x", "f4")]), "dtype [('x', '<f4')]"),
    "list of ints": (lambda a: a.astype(int).tolist(), "dtype int64; convert it first, with astype"),
    "list of complex": (lambda a: a.astype(complex).tolist(), "dtype complex128"),
    "None": (lambda a: None, "None"),
    "object()": (lambda a: object(), "an object of type object"),
    "a class": (lambda a: np.ndarray, "an object of type type"),
    "dict": (lambda a: {"a": a}, "an object of type dict"),
    "generator": (lambda a: iter(a), "an object of type"),
    "text": (lambda a: "zeros", "dtype <U5"),
    "released buffer": (lambda a: released(memoryview(a)), "an object of type memoryview"),
    "ints of another kind": (lambda a: array_module.array("q", [1, 2]), "dtype int64"),
}


def released(view):
    view.release()
    return view


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", WRONG_FLOATS)
def test_wrong_dtypes(name, kind):
    make, got = WRONG_FLOATS[kind]
    refused_call(TypeError, [f"{name} {ACCEPTED}{got}"], **{name: make(numbers(FLOATS[name]))})


@pytest.mark.parametrize("name", [*FLOATS, "spatial_shapes", "level_start_index"])
def test_masks_are_not_dropped_silently(name):
    masked = np.ma.masked_equal(well_formed()[name], 1)
    fragments = [f"{name} must be a plain array, got a masked array", "filled()"]
    refused_call(TypeError, fragments, **{name: masked})
    refused_call(TypeError, fragments, **{name: ArrayProvider(masked)})


AXES = {
    "value": "4 axes, (bs, num_keys, num_heads, channels)",
    "sampling_locations": "6 axes, (bs, num_queries, num_heads, num_levels, num_points, 2)",
    "attention_weights": "5 axes, (bs, num_queries, num_heads, num_levels, num_points)",
    "grad_output": "3 axes, (bs, num_queries, num_heads*channels)",
    "spatial_shapes": "2 axes, (num_levels, 2)",
    "level_start_index": "1 axis, (num_levels,)",
}


@pytest.mark.parametrize("name", AXES)
def test_wrong_numbers_of_axes(name):
    right = well_formed()[name]
    for wrong in (right[0], right[..., None], right[None], right.ravel()[0]):
        refused_call(ValueError, [f"{name} must have {AXES[name]}, got shape {wrong.shape}"], **{name: wrong})


def test_grad_output_parted_into_heads_by_the_caller():
    refused_call(
        ValueError,
        ["grad_output must have 3 axes", "got shape (2, 6, 3, 4)"],
        grad_output=np.zeros((BS, QUERIES, HEADS, CHANNELS)),
    )


WRONG_INTEGERS = [
    ("spatial_shapes", np.array(SHAPES, float), "must be an integer array, got dtype float64"),
    ("spatial_shapes", np.array(SHAPES, bool), "must be an integer array, got dtype bool"),
    ("spatial_shapes", np.array(SHAPES, object), "must be an integer array, got dtype object"),
    ("spatial_shapes", np.empty((0, 2)), "must be an integer array, got dtype float64"),
    ("spatial_shapes", None, "must be an integer array, got None"),
    ("spatial_shapes", 3, None),
    ("spatial_shapes", "3x5", "must be an integer array, got dtype <U3"),
    ("spatial_shapes", np.array(SHAPES, "m8[s]"), "must be an integer array, got dtype timedelta64[s]"),
    ("spatial_shapes", [(3, 5), (2.0, 2)], "must hold integers, got 2.0 in it"),
    ("spatial_shapes", [(3, 5), (np.float32(2), 2)], "got an object of type float32 in it"),
    ("spatial_shapes", [(3, 5), (True, 2)], "must hold integers, got True in it"),
    ("spatial_shapes", [(3, 5), (np.True_, 2)], "got an object of type bool in it"),
    ("spatial_shapes", [(3, 5), (None, 2)], "must hold integers, got None in it"),
    ("spatial_shapes", [(3, 5), ("2", "2")], "must hold integers, got '2' in it"),
    ("spatial_shapes", [(3, 5), (ArrayProvider(RAISED), 2)], None),
    ("spatial_shapes", [(3, 5), (Treacherous(), 2)], None),
    ("level_start_index", np.array([0.0, 15.0]), "must be an integer array, got dtype float64"),
    ("level_start_index", np.array([False, True]), "must be an integer array, got dtype bool"),
    ("level_start_index", np.empty(0), "must be an integer array, got dtype float64"),
    ("level_start_index", [0, 15.0], "must hold integers, got 15.0 in it"),
    ("level_start_index", [False, 15], "must hold integers, got False in it"),
    ("level_start_index", "packed", "must be an integer array, got dtype <U6"),
    ("level_start_index", object(), "must be an integer array, got an object of type object"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), WRONG_INTEGERS)
def test_level_arguments_that_are_not_integers(name, wrong, message):
    if message is None:
        with pytest.raises((TypeError, ValueError), match=name):
            check(well_formed(**{name: wrong}))
    else:
        refused_call(TypeError, [f"{name} must ", message], **{name: wrong})


@pytest.mark.parametrize(
    ("shapes", "shape"),
    [
        (np.array([*SHAPES, (1, 1)]).T, (2, 3)),
        ([(3, 5, 0), (2, 2, 15)], (2, 3)),
        ([[]], (1, 0)),
        (np.empty((2, 0), int), (2, 0)),
    ],
)
def test_spatial_shapes_must_be_pairs(shapes, shape):
    refused_call(
        ValueError,
        [f"spatial_shapes must have shape (num_levels, 2), rows of (H, W), got shape {shape}"],
        spatial_shapes=shapes,
    )


def test_a_ragged_list_of_shapes():
    refused_call((ValueError), ["spatial_shapes must have 2 axes", "(2,)"], spatial_shapes=[(3, 5), (2,)])


@pytest.mark.parametrize(
    ("order", "exception"),
    [(None, TypeError), (3, TypeError), (["x", "y"], TypeError), ("XY", ValueError), ("", ValueError)],
)
def test_coordinate_order(order, exception):
    refused_call(exception, ["coordinate_order must be 'xy' or 'yx', got"], coordinate_order=order)


def test_an_error_does_not_repeat_a_long_text():
    error = refused_call(ValueError, ["got an object of type str"], coordinate_order="xy" * 10**6)
    assert len(str(error)) < 100


# Lengths that two arguments share

DISAGREEMENTS = [
    # argument, axis, its name, the argument that it must agree with
    ("level_start_index", 0, "num_levels", "spatial_shapes"),
    ("sampling_locations", 0, "bs", "value"),
    ("sampling_locations", 2, "num_heads", "value"),
    ("sampling_locations", 3, "num_levels", "spatial_shapes"),
    ("attention_weights", 0, "bs", "value"),
    ("attention_weights", 1, "num_queries", "sampling_locations"),
    ("attention_weights", 2, "num_heads", "value"),
    ("attention_weights", 3, "num_levels", "spatial_shapes"),
    ("attention_weights", 4, "num_points", "sampling_locations"),
    ("grad_output", 0, "bs", "value"),
    ("grad_output", 1, "num_queries", "sampling_locations"),
]


@pytest.mark.parametrize("length", [0, 1, 11])
@pytest.mark.parametrize(("name", "axis", "axis_name", "other"), DISAGREEMENTS)
def test_lengths_that_differ(name, axis, axis_name, other, length):
    right = np.shape(well_formed()[name])
    shape = (*right[:axis], length, *right[axis + 1 :])
    wrong = np.zeros(shape, np.int64 if name == "level_start_index" else np.float32)
    expected = (
        f"{name} has shape {shape}: its {axis_name} (axis {axis}) is {length}, "
        f"but that of {other} is {right[axis]}"
    )
    refused_call(ValueError, [expected], **{name: wrong})


def test_batch_and_queries_in_the_wrong_order():
    """The same number of elements is not enough."""
    for name in ("sampling_locations", "attention_weights", "grad_output"):
        wrong = well_formed()[name].swapaxes(0, 1)
        expected = f"{name} has shape {wrong.shape}: its bs (axis 0) is 6, but that of value is 2"
        refused_call(ValueError, [expected], **{name: wrong})


@pytest.mark.parametrize("length", [0, 1, 3])
def test_coordinates_are_pairs(length):
    shape = (*FLOATS["sampling_locations"][:-1], length)
    refused_call(
        ValueError,
        [f"sampling_locations has shape {shape}", "2 coordinates", f"got {length}"],
        sampling_locations=np.zeros(shape),
    )


@pytest.mark.parametrize("length", [0, 1, 3, 4, 11, 13])
def test_the_last_axis_of_grad_output_is_heads_times_channels(length):
    refused_call(
        ValueError,
        [f"grad_output has shape (2, 6, {length})", f"is {length}", "num_heads*channels", "is 3*4 = 12"],
        grad_output=np.zeros((BS, QUERIES, length)),
    )


# Where the levels lie

INT64_MAX = 2**63 - 1
MISPLACED = [
    # spatial_shapes, level_start_index, the message
    ([(3, 5), (2, 3)], None, ["level_start_index None", "add up to 21", "num_keys (axis 1 of value) is 19"]),
    ([(3, 5), (2, 1)], None, ["spatial_shapes", "add up to 17", "num_keys (axis 1 of value) is 19"]),
    ([(5, 3), (2, 2**62)], None, [f"add up to {15 + 2**63}", "is 19"]),
    ([(2**62, 2**62), (2, 2)], None, [f"add up to {2**124 + 4}"]),
    ([(2**32, 2**32), (19, 1)], None, [f"add up to {2**64 + 19}"]),  # 19 again in 64 bits
    ([(3, 5), (-2, -2)], None, ["spatial_shapes[1] is (-2, -2)", f"from 0 to {INT64_MAX}"]),
    ([(3, -5), (2, 2)], [0, 15], ["spatial_shapes[0] is (3, -5)"]),
    ([(-3, 0), (2, 2)], [0, 15], ["spatial_shapes[0] is (-3, 0)"]),
    ([(0, 2**63), (2, 2)], [0, 15], [f"spatial_shapes[0] is (0, {2**63})", f"from 0 to {INT64_MAX}"]),
    ([(2**63, 0), (2, 2)], None, [f"spatial_shapes[0] is ({2**63}, 0)"]),
    ([(3, 5), (2, 2)], [0, -1], ["level_start_index[1] is -1", "0 or more"]),
    ([(3, 5), (0, 0)], [0, -1], ["level_start_index[1] is -1", "0 or more"]),
    ([(3, 5), (2, 2)], [0, 16], ["level_start_index[1]", "16 + 2*2 = 20", "num_keys (axis 1 of value)"]),
    ([(3, 5), (2, 2)], [5, 0], ["level 0 reaches beyond value", "5 + 3*5 = 20", "is 19"]),
    ([(3, 5), (0, 2)], [0, 20], ["20 + 0*2 = 20", "is 19"]),
    ([(3, 5), (2, 2)], [0, INT64_MAX], [f"{INT64_MAX} + 2*2 = {INT64_MAX + 4}"]),
    ([(3, 5), (2, 2)], [0, 2**64 - 1], [f"{2**64 - 1} + 2*2 = {2**64 + 3}"]),  # 3 in 64 bits
    ([(2**32, 2**32), (2, 2)], [0, 15], [f"0 + {2**32}*{2**32} = {2**64}"]),
]


@pytest.mark.parametrize(("shapes", "starts", "message"), MISPLACED)
def test_levels_that_do_not_fit(shapes, starts, message):
    refused_call(ValueError, message, spatial_shapes=shapes, level_start_index=starts)
    as_arrays = []
    for given_numbers in (shapes, starts):
        if given_numbers is None:
            as_arrays.append(None)
            continue
        flat = np.ravel(np.array(given_numbers, dtype=object)).tolist()
        dtype = np.uint64 if max(flat) > INT64_MAX else np.int64
        as_arrays.append(np.array(given_numbers, dtype=dtype))
    refused_call(ValueError, message, spatial_shapes=as_arrays[0], level_start_index=as_arrays[1])


@pytest.mark.parametrize("huge", [2**64, -(2**64), pytest.param(10**6000, id="10**6000")])
@pytest.mark.parametrize("name", ["spatial_shapes", "level_start_index"])
def test_integers_of_more_than_64_bits(name, huge):
    wrong = {"spatial_shapes": [(3, 5), (huge, 0)], "level_start_index": [0, huge]}[name]
    refused_call(
        ValueError, [f"{name} must hold 64-bit integers", f"{huge.bit_length()} bits"], **{name: wrong}
    )


@given(
    levels=st.lists(st.tuples(*[st.integers(-1, 6)] * 2, st.integers(-2, 22)), max_size=4),
    packed=st.booleans(),
    as_array=st.booleans(),
)
@settings(deadline=None)
def test_levels_are_accepted_exactly_when_they_lie_inside(levels, packed, as_array):
    shapes, starts = [level[:2] for level in levels], [level[2] for level in levels]
    areas = [h * w for h, w in shapes]
    right = all(h >= 0 and w >= 0 for h, w in shapes)
    if packed:
        right = right and sum(areas) == KEYS
        starts = [0, *itertools.accumulate(areas)][:-1]
    else:
        right = right and all(s >= 0 and s + a <= KEYS for s, a in zip(starts, areas, strict=True))
    shape = (1, 1, 1, len(levels), 1)
    convert = (lambda a, s: np.array(a, np.int64).reshape(s)) if as_array else (lambda a, s: a)
    call = (
        np.zeros((1, KEYS, 1, 1)),
        convert(shapes, (-1, 2)),
        None if packed else convert(starts, -1),
        np.zeros((*shape, 2)),
        np.zeros(shape),
        "xy",
    )
    if right:
        expected = [[h, w, s] for (h, w), s in zip(shapes, starts, strict=True)]
        assert arguments.forward_inputs(*call).shapes.levels.tolist() == expected
    else:
        with pytest.raises(ValueError, match=r"spatial_shapes|level_start_index"):
            arguments.forward_inputs(*call)


def test_levels_that_another_thread_changes_are_the_checked_ones():
    shapes, starts = np.array(SHAPES), np.array(STARTS)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            shapes[1] = 2**40
            starts[0] = -7
            shapes[1] = 2
            starts[0] = 0

    call = well_formed(spatial_shapes=shapes, level_start_index=starts)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(2000):
            try:
                levels = check(call).shapes.levels
            except ValueError:
                continue
            for height, width, start in levels.tolist():
                assert start >= 0 and start + height * width <= KEYS
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


# The order of the checks


def test_the_first_mistake_is_the_one_reported():
    """Mend one mistake after the other, and see the next one come up."""
    mistakes = [
        ({"coordinate_order": "zz"}, "coordinate_order"),
        ({"value": np.zeros((1, 1, 1, 1), int)}, "value must be"),
        ({"spatial_shapes": np.zeros((2, 2))}, "spatial_shapes must be an integer"),
        ({"level_start_index": np.zeros((2, 2), int)}, "level_start_index must have 1 axis"),
        ({"sampling_locations": np.zeros(3)}, "sampling_locations must have 6"),
        ({"attention_weights": np.zeros(3, complex)}, "attention_weights must be"),
        ({"level_start_index": [0, 1, 2]}, "its num_levels (axis 0) is 3"),
        ({"sampling_locations": np.zeros((9, QUERIES, HEADS, 2, POINTS, 2))}, "its bs (axis 0) is 9"),
        ({"attention_weights": np.zeros((BS, 9, HEADS, 2, POINTS))}, "its num_queries (axis 1) is 9"),
        ({"spatial_shapes": [(30, 5), (2, 2)]}, "level 0 reaches beyond value"),
        ({"grad_output": np.zeros((BS, QUERIES, 1), int)}, "grad_output must be"),
        ({"grad_output": np.zeros((BS, QUERIES, 1))}, "grad_output has shape"),
    ]
    while mistakes:
        call = well_formed()
        for change, _ in reversed(mistakes):
            call |= change
        refused((TypeError if " must be" in mistakes[0][1] else ValueError), [mistakes[0][1]], check, call)
        del mistakes[0]
    check(well_formed())


ODDITIES = [None, 0, -1, 1.5, True, "", "value", b"yx", [], (), [[]], {}, set(), object(), np.ndarray]
ODDITIES += [np.float32(1), np.array(3), np.zeros(0), np.zeros((2, 2)), np.full((2, 2), 2**63, np.uint64)]
ODDITIES += [Treacherous(), ArrayProvider(3), ArrayProvider(RAISED), range(2), "yx" * 10**5, 10**9999]


@given(data=st.data())
@settings(deadline=None)
def test_whatever_is_passed_the_error_names_an_argument(data):
    call = well_formed()
    for name in data.draw(st.sets(st.sampled_from(sorted(call)), min_size=1)):
        call[name] = data.draw(st.sampled_from(ODDITIES))
    try:
        check(call)
    except (TypeError, ValueError) as error:
        assert re.match("|".join([*call, "with level_start_index", "level [0-9]"]), str(error))
        assert len(str(error)) < 1000


# wrt

WRT_RIGHT = [
    (arguments.GRADIENT_NAMES, ALL),
    (("value", "sampling_locations", "attention_weights"), ALL),
    (["attention_weights", "value", "sampling_locations"], ALL),
    (("value",), (True, False, False)),
    ("sampling_locations", (False, True, False)),
    ({"attention_weights", "sampling_locations"}, (False, True, True)),
    (frozenset({"value"}), (True, False, False)),
    (("value", "value"), (True, False, False)),
    ((np.str_("attention_weights"),), (False, False, True)),
    ((), (False, False, False)),
    ([], (False, False, False)),
]
WRT_WRONG = [
    ("values", ValueError, "got 'values'"),
    ("", ValueError, "got ''"),
    (("value", "grad_output"), ValueError, "got 'grad_output'"),
    (["Value"], ValueError, "got 'Value'"),
    (("value", None), TypeError, "got None in it"),
    ((b"value",), TypeError, "got b'value' in it"),
    ((("value",),), TypeError, "got an object of type tuple in it"),
    ((1,), TypeError, "got 1 in it"),
    ((np.zeros(2), *GRADIENTS[1:]), TypeError, "got an object of type ndarray in it"),
    ((True, False, False), TypeError, "got True in it"),
    (None, TypeError, "got None"),
    (0, TypeError, "got 0"),
    (b"value", TypeError, "got b'value'"),
    (itertools.repeat("value"), TypeError, "got an object of type repeat"),
    (np.array(["value"]), TypeError, "got an object of type ndarray"),
]


@pytest.mark.parametrize(("wrt", "wanted"), WRT_RIGHT)
def test_wrt(wrt, wanted):
    assert arguments.check_wrt(wrt) == wanted


@pytest.mark.parametrize(("wrt", "exception", "message"), WRT_WRONG)
def test_wrong_wrt(wrt, exception, message):
    expected = "('value', 'sampling_locations', 'attention_weights')"
    refused(exception, ["wrt must ", expected, message], arguments.check_wrt, wrt)


# out


def outputs(dtype="float32"):
    """Return arrays for the gradients, full of a number that no check may change."""
    return [np.full(FLOATS[name], 7, dtype) for name in GRADIENTS]


def check_out(out, **changes):
    """Check `out` of forward against a call, and see that neither is touched."""
    call = well_formed(**changes)
    del call["grad_output"]
    before = out.tobytes() if isinstance(out, np.ndarray) else None
    try:
        return arguments.forward_out(out, arguments.forward_inputs(**call))
    finally:
        if before is not None:
            assert out.tobytes() == before


def check_outs(outs, wanted=ALL, order="xy", **changes):
    before = [out.tobytes() for out in outs if isinstance(out, np.ndarray)]
    inputs = check(well_formed(coordinate_order=order, **changes))
    try:
        return arguments.backward_out(outs, wanted, inputs, order)
    finally:
        assert [out.tobytes() for out in outs if isinstance(out, np.ndarray)] == before


@pytest.mark.parametrize("dtype", arguments.FLOAT_NAMES)
def test_out_may_have_any_layout_and_dtype(dtype):
    dtype = float_dtype(dtype)
    for label, out in hostile.hostile_out((BS, QUERIES, HEADS * CHANNELS), dtype):
        checked = check_out(out)
        assert checked.strides == out.strides and checked.dtype == out.dtype, label
        assert checked.__array_interface__["data"] == out.__array_interface__["data"], label
    for k, name in enumerate(GRADIENTS):
        for label, out in hostile.hostile_out(FLOATS[name], dtype):
            outs = [None, None, None]
            outs[k] = out
            checked = check_outs(outs)
            assert checked[k].strides == out.strides and checked[k].dtype == out.dtype, label
            assert [array is None for array in checked] == [array is None for array in outs]


@pytest.mark.parametrize("container", [tuple, list])
@pytest.mark.parametrize("order", ["xy", "yx"])
def test_out_of_backward(container, order):
    outs = outputs()
    checked = check_outs(container(outs), order=order)
    assert isinstance(checked, tuple)
    for k in range(3):
        checked[k][...] = well_formed()[GRADIENTS[k]]
    flip = slice(None, None, -1 if order == "yx" else 1)
    assert outs[0].tobytes() == well_formed()["value"].tobytes()
    assert outs[1].tobytes() == well_formed()["sampling_locations"][..., flip].tobytes()
    assert outs[2].tobytes() == well_formed()["attention_weights"].tobytes()


def test_an_entry_of_out_may_be_left_to_us():
    outs = outputs()
    assert [array is None for array in check_outs((None, outs[1], None))] == [True, False, True]
    assert check_outs((None, None, None), order="yx") == (None, None, None)
    assert check_outs((None, None, None), wanted=(False, False, False)) == (None, None, None)


@pytest.mark.parametrize("k", range(3))
def test_an_entry_of_out_that_wrt_leaves_out(k):
    wanted = tuple(j != k for j in range(3))
    fragments = [f"out[{k}] (the gradient of {GRADIENTS[k]}) must be None", f"wrt leaves {GRADIENTS[k]} out"]
    refused(ValueError, fragments, check_outs, outputs(), wanted)
    outs = outputs()
    outs[k] = None
    check_outs(outs, wanted)


@pytest.mark.parametrize(
    ("wrong", "exception", "message"),
    [
        (np.zeros(3), TypeError, "out must be a tuple of three arrays (or None)"),
        (None, TypeError, "got None"),
        ({}, TypeError, "got an object of type dict"),
        (np.zeros((3, 2)), TypeError, "got an object of type ndarray"),
        ((), ValueError, "out must have three entries"),
        ((None, None), ValueError, "got 2"),
        ([None] * 4, ValueError, "got 4"),
    ],
)
def test_out_of_backward_must_be_three(wrong, exception, message):
    inputs = check(well_formed())
    gradients = "the gradients of value, sampling_locations, attention_weights"
    refused(exception, [message, gradients], arguments.backward_out, wrong, ALL, inputs, "xy")


OUT_SHAPE = (BS, QUERIES, HEADS * CHANNELS)
WRONG_OUTS = {
    "list": (lambda shape: np.zeros(shape).tolist(), TypeError, "got an object of type list"),
    "provider": (lambda shape: ArrayProvider(np.zeros(shape)), TypeError, "must be a NumPy array, got"),
    "scalar": (lambda shape: np.float32(1), TypeError, "got an object of type float32"),
    "masked": (lambda shape: np.ma.zeros(shape), TypeError, "must be a plain array, got a masked array"),
    "int": (lambda shape: np.zeros(shape, int), TypeError, f"{ACCEPTED}dtype int64"),
    "object": (lambda shape: np.zeros(shape, object), TypeError, f"{ACCEPTED}dtype object"),
    "complex": (lambda shape: np.zeros(shape, complex), TypeError, f"{ACCEPTED}dtype complex128"),
    "longer": (lambda shape: np.zeros((*shape[:-1], 99)), ValueError, "got shape ("),
    "shorter": (lambda shape: np.zeros(shape)[..., :-1], ValueError, "must have shape ("),
    "axis too many": (lambda shape: np.zeros((1, *shape)), ValueError, "must have shape ("),
    "would broadcast": (lambda shape: np.zeros((*shape[:-1], 1)), ValueError, "must have shape ("),
    "flat": (lambda shape: np.zeros(np.prod(shape)), ValueError, "must have shape ("),
    "read-only": (lambda shape: read_only(np.zeros(shape)), ValueError, "must be writeable, got a read-only"),
    "broadcast": (lambda shape: np.broadcast_to(0.0, shape), ValueError, "must not overlap itself"),
    "zero stride": (lambda shape: overlapping(shape, 0, 0), ValueError, "must not overlap itself"),
    "window": (lambda shape: overlapping(shape, 1, 8), ValueError, "must not overlap itself"),
    "half an element": (lambda shape: overlapping(shape, -1, 4), ValueError, "elements share memory"),
}


def read_only(array):
    array.flags.writeable = False
    return array


def overlapping(shape, axis, stride):
    array = np.zeros(shape)
    strides = list(array.strides)
    strides[axis] = stride
    return as_strided(array, shape, strides)


@pytest.mark.parametrize("kind", WRONG_OUTS)
def test_wrong_out(kind):
    make, exception, message = WRONG_OUTS[kind]
    shapes = ["(bs, num_queries, num_heads*channels)", str(OUT_SHAPE)] if "shape" in message else []
    refused(exception, ["out must ", message, *shapes], check_out, make(OUT_SHAPE))
    for k, name in enumerate(GRADIENTS):
        outs = outputs()
        outs[k] = make(FLOATS[name])
        shapes = [f"that of {name}", str(FLOATS[name])] if "shape" in message else []
        refused(exception, [f"out[{k}] (the gradient of {name}) must ", message, *shapes], check_outs, outs)


def test_an_array_from_broadcast_arrays_is_refused_without_a_warning():
    out, _ = np.broadcast_arrays(np.zeros((BS, 1, HEADS * CHANNELS)), np.zeros(OUT_SHAPE))
    refused(ValueError, ["out must not overlap itself"], check_out, out)


@pytest.mark.parametrize("name", [*FLOATS, "spatial_shapes", "level_start_index"])
def test_out_that_shares_memory_with_an_input(name):
    memory = np.zeros(max(np.prod(shape) for shape in FLOATS.values()) + 3)

    def placed(shape, dtype, offset):
        return np.ndarray(shape, dtype, memory, offset)

    call = well_formed()
    dtype, shape = call[name].dtype, call[name].shape
    size = int(np.prod(shape)) * dtype.itemsize
    given_input = placed(shape, dtype, 8)
    given_input[...] = call[name]

    for k, gradient in enumerate(GRADIENTS):
        last = size + 8 - 1  # the last byte of the input
        for offset in (0, 8, 7, last):
            outs = [None, None, None]
            outs[k] = placed(FLOATS[gradient], "f2", offset)
            fragments = [f"out[{k}] (the gradient of {gradient}) must not overlap {name}", "share memory"]
            refused(ValueError, fragments, check_outs, outs, **{name: given_input})
            refused(ValueError, fragments, check_outs, outs, order="yx", **{name: given_input})
        outs[k] = placed(FLOATS[gradient], "f2", last + 1)
        check_outs(outs, **{name: given_input})
    if name != "grad_output":
        out = placed(OUT_SHAPE, "f4", 4)
        refused(ValueError, [f"out must not overlap {name}"], check_out, out, **{name: given_input})
        check_out(placed(OUT_SHAPE, "f4", size + 8), **{name: given_input})


def test_out_that_shares_memory_with_what_a_provider_shows():
    value = numbers(FLOATS["value"])
    outs = [value, None, None]
    for provider in PROVIDERS.values():
        refused(ValueError, ["must not overlap value"], check_outs, outs, value=provider(value))
    check_outs(outs, value=value.tolist())


def test_outs_that_share_memory():
    shared = np.zeros(1000)
    outs = [np.ndarray(FLOATS[name], "f2", shared) for name in GRADIENTS]
    for j, k in itertools.combinations(range(3), 2):
        pair = [outs[i] if i in (j, k) else None for i in range(3)]
        names = [f"out[{i}] (the gradient of {GRADIENTS[i]})" for i in (k, j)]
        refused(ValueError, [f"{names[0]} must not overlap {names[1]}"], check_outs, pair)


def test_interleaved_arrays_do_not_overlap():
    both = np.zeros((*OUT_SHAPE, 2), np.float32)
    check_out(both[..., 0])
    double = np.zeros((*OUT_SHAPE[:-1], 2 * OUT_SHAPE[-1]))
    check_out(double[..., ::2])
    outs = np.zeros((2, *FLOATS["attention_weights"], 2))
    value = np.zeros((*FLOATS["value"][:3], 2 * CHANNELS))
    check_outs(
        (value[..., 1::2], outs[0], outs[1, ..., 1]), value=value[..., ::2], attention_weights=outs[1, ..., 0]
    )
    # One row of a record for each query: locations, weights and grad_output of it, and where they go.
    row = {name: np.dtype((np.float32, FLOATS[name][2:])) for name in list(FLOATS)[1:]}
    record = np.zeros((BS, QUERIES), np.dtype([*row.items(), *((f"out_{name}", row[name]) for name in row)]))
    check_outs(
        (None, record["out_sampling_locations"], record["out_attention_weights"]),
        **{name: record[name] for name in row},
    )


def test_what_is_too_hard_to_tell_is_refused(monkeypatch):
    memory = np.zeros(10**6, np.uint8)
    intricate = np.ndarray(OUT_SHAPE, np.float32, memory, strides=(554, 2335, 68))
    simpler = np.ndarray(OUT_SHAPE, np.float32, memory, strides=(23647, 941, 108))
    value = np.ndarray(FLOATS["value"], np.float32, memory, 1, strides=(29541, 1304, 35, 5))
    check_out(intricate)
    monkeypatch.setattr(arguments, "_OVERLAP_WORK", 1)
    for wrong, other, strides in [
        (intricate, "itself", "(554, 2335, 68): use"),
        (simpler, "value", "(23647, 941, 108) and (29541, 1304, 35, 5): use"),
        # Strides past all memory, where NumPy's integers would overflow.
        (as_strided(memory.view("f4"), OUT_SHAPE, (2**61 + 70, 2**60 + 28, 2**58 + 3)), "itself", "("),
    ]:
        message = f"out must not overlap {other}, which is too hard to tell for strides {strides}"
        refused(ValueError, [message], check_out_alone, wrong, value)


def check_out_alone(out, value):
    call = well_formed(value=value)
    del call["grad_output"]
    arguments.forward_out(out, arguments.forward_inputs(**call))


@st.composite
def strided(draw, max_axes=4):
    """An array anywhere in a small buffer, overlapping itself or not."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=max_axes))
    strides = draw(st.lists(st.integers(-14, 14), min_size=len(shape), max_size=len(shape)))
    dtype = draw(st.sampled_from(["u1", "f2", "f4", "V3"]))
    return np.ndarray(shape, dtype, np.zeros(1024, np.uint8), 512, strides)


@given(strided())
@settings(deadline=None, max_examples=400)
def test_overlap_with_itself_is_found_exactly(array):
    steps = [stride * np.arange(n) for n, stride in zip(array.shape, array.strides, strict=True)]
    steps.append(np.arange(array.itemsize))
    touched = np.zeros(1024, int)
    np.add.at(touched, 512 + sum(np.ix_(*steps)), 1)
    assert arguments._overlaps_itself("out", array) == (touched.max() > 1)


# dtypes


def test_names_of_dtypes():
    for name in arguments.FLOAT_NAMES:
        if name != "bfloat16":
            assert arguments.dtype_name(np.dtype(name)) == name
            assert arguments.dtype_name(np.dtype(name).newbyteorder()) == name
    for other in ("i4", "?", "c8", np.longdouble, "V2", "S2", [("float32", "f4")], object, "M8[s]"):
        assert arguments.dtype_name(np.dtype(other)) is None


def test_bfloat16_is_known_by_its_name_alone():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for _ in range(2):  # found out, and then remembered
        assert arguments.dtype_name(np.dtype(ml_dtypes.bfloat16)) == "bfloat16"
        assert arguments.dtype_name(np.dtype(ml_dtypes.bfloat16).newbyteorder()) == "bfloat16"
    # One that has no number of its own, or no two bytes.
    assert arguments.dtype_name(SimpleNamespace(num=-1, itemsize=2, name="bfloat16")) == "bfloat16"
    for name, itemsize in (("float8", 2), ("bfloat16", 4)):
        assert arguments.dtype_name(SimpleNamespace(num=-1, itemsize=itemsize, name=name)) is None
    for other in (ml_dtypes.float8_e5m2, ml_dtypes.int4):
        assert arguments.dtype_name(np.dtype(other)) is None
    text = "must be a float16, bfloat16, float32 or float64 array, got dtype float8_e5m2"
    refused_call(TypeError, [text], value=np.zeros(FLOATS["value"], ml_dtypes.float8_e5m2))


# The helper that makes hostile arrays


@pytest.mark.parametrize("dtype", arguments.FLOAT_NAMES)
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 1, 2), (3, 0, 2)])
def test_hostile_arrays_are_equal_and_gaps_are_watched(shape, dtype):
    array = numbers(shape, float_dtype(dtype))
    for label, variant in hostile.hostile(array):
        assert variant.shape == shape and variant.astype(array.dtype).tobytes() == array.tobytes(), label
    for label, out in hostile.hostile_out(shape, array.dtype):
        out[...] = array
        assert hostile.gaps_intact(out), label
        buffer = hostile._buffer_of(out)
        buffer[-1:] = 0
        assert hostile.gaps_intact(out) == (buffer.nbytes == out.nbytes), label


# ---- what is kept from call to call ---------------------------------------------------------------------


def test_calls_that_are_alike_share_shapes_and_plans():
    first, second = check(well_formed()), check(well_formed(spatial_shapes=SHAPES, level_start_index=STARTS))
    assert first.shapes is second.shapes
    assert plan.backward(first, 2, None) is plan.backward(second, 2, None)
    assert plan.backward(first, 2, None) is not plan.backward(first, 1, None)
    assert plan.forward(first, 2) is not plan.forward(check(well_formed("float64")), 2)
    assert not first.shapes.levels.flags.writeable


def test_what_is_kept_does_not_excuse_a_wrong_call():
    for _ in range(2):
        check(well_formed())
        refused(
            ValueError, ["level_start_index", "reaches beyond"], check, well_formed(level_start_index=[0, 16])
        )
        refused(TypeError, ["spatial_shapes", "True"], check, well_formed(spatial_shapes=[(3, 5), (True, 4)]))
        refused(TypeError, ["spatial_shapes"], check, well_formed(spatial_shapes=np.array(SHAPES, float)))
        refused(TypeError, ["value"], check, well_formed(value=numbers(FLOATS["value"], int)))
    sizes = np.array(SHAPES)
    call = well_formed(spatial_shapes=sizes)
    check(call)
    sizes[1, 1] = 9
    refused(ValueError, ["reaches beyond"], check, call)


def test_memory_does_not_grow_with_the_calls():
    def call(queries, levels):
        shapes = np.ones((levels, 2), int)
        samples = (1, queries, 1, levels, 1)
        return arguments.forward_inputs(
            numbers((1, levels, 1, 1)), shapes, None, numbers((*samples, 2)), numbers(samples), "xy"
        )

    kept = [call(queries, 2).shapes for queries in range(200)]
    assert sum(call(queries, 2).shapes is kept[queries] for queries in range(199, -1, -1)) <= 64
    assert call(3, 65).shapes is not call(3, 65).shapes
    inputs = call(3, 2)
    for num_threads in range(1, 257):
        plan.forward(inputs, num_threads)
    assert len(inputs.shapes.plans) <= 64
