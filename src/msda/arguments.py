"""From what users pass to checked arrays; every error message about an argument is written here.

The checks come in this order, and the first that fails is the one reported:

1. ``coordinate_order``;
2. each array argument by itself, in the order of the signature: can it be read as an array, has it an
   accepted dtype, has it the right number of axes;
3. lengths that two arguments share: levels, batch, heads, queries, points;
4. the values in ``spatial_shapes`` and ``level_start_index``, level by level, against ``num_keys``;
5. ``grad_output``, by itself and against the others;
6. ``wrt``, then ``out``: its type, dtype and shape, whether it overlaps itself, whether it can be written,
   whether it overlaps an input or another output.

What is of the wrong type or dtype is a TypeError, a wrong shape, number or name a ValueError. Nothing is
written before the last check has passed.

A float array is never copied for its layout, alignment or byte order: the kernels take all of them. It is
always a view of its own, though, so that a caller who assigns to ``array.shape`` or ``array.dtype`` in
another thread does not change what was checked. The few integers that describe the levels are copied first
and then checked, as Python integers, which cannot overflow.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")
GRADIENT_NAMES = ("value", "sampling_locations", "attention_weights")

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_NAME_BY_NUM = {np.dtype(name).num: name for name in FLOAT_NAMES if name != "bfloat16"}

_INT64_MAX = 2**63 - 1

# Calls with more levels than these are checked anew each time.
_MOST_LEVELS_KEPT = 64

# How hard NumPy may think about whether two strided arrays meet: some 0.05 s. The layouts that slicing and
# transposing make take a few steps.
_OVERLAP_WORK: Any = 1_000_000  # the type stubs know 0 and -1 only

_GRADIENT_LIST = "the gradients of " + ", ".join(GRADIENT_NAMES)
_GRADIENT_LABELS = tuple(f"out[{k}] (the gradient of {name})" for k, name in enumerate(GRADIENT_NAMES))

AXES = {
    "value": ("bs", "num_keys", "num_heads", "channels"),
    "spatial_shapes": ("num_levels", "2"),
    "level_start_index": ("num_levels",),
    "sampling_locations": ("bs", "num_queries", "num_heads", "num_levels", "num_points", "2"),
    "attention_weights": ("bs", "num_queries", "num_heads", "num_levels", "num_points"),
    "grad_output": ("bs", "num_queries", "num_heads*channels"),
}
# msda.aclnn calls the same arrays by the operator's names.
AXES |= {
    "spatialShape": AXES["spatial_shapes"],
    "levelStartIndex": AXES["level_start_index"],
    "location": AXES["sampling_locations"],
    "attnWeight": AXES["attention_weights"],
    "gradOutput": AXES["grad_output"],
}
# len(AXES[name]), looked up in every call
_RANKS = {name: len(axes) for name, axes in AXES.items()}


class Shapes:
    """The lengths of all axes and the levels of a call, checked.

    Calls that are alike share one, if it is kept (`_agreed`).

    Attributes
    ----------
    value : tuple of int
        (bs, num_keys, num_heads, channels)
    weights : tuple of int
        Of attention_weights: (bs, num_queries, num_heads, num_levels, num_points).
    levels : ndarray of int64, shape (num_levels, 3)
        Height, width and first key of each level; C-contiguous and read-only.
    output : tuple of int
        (bs, num_queries, num_heads*channels)
    output_by_head : tuple of int
        (bs, num_queries, num_heads, channels)
    plans : dict
        For `msda.plan`, which keeps here what it has planned for calls of these shapes.
    """

    __slots__ = ("levels", "output", "output_by_head", "plans", "value", "weights")

    def __init__(self, value: tuple[int, ...], weights: tuple[int, ...], levels: NDArray[np.int64]) -> None:
        self.value = value
        self.weights = weights
        self.levels = levels
        self.output = (value[0], weights[1], value[2] * value[3])
        self.output_by_head = (value[0], weights[1], value[2], value[3])
        self.plans: dict[tuple[Any, ...], Any] = {}


class Inputs(NamedTuple):
    """The checked inputs of one call.

    Attributes
    ----------
    shapes : Shapes
    value : ndarray, shape (bs, num_keys, num_heads, channels)
    sampling_locations : ndarray, shape (bs, num_queries, num_heads, num_levels, num_points, 2)
        Always (x, y), whatever the caller's order.
    attention_weights : ndarray, shape (bs, num_queries, num_heads, num_levels, num_points)
    grad_output : ndarray or None, shape (bs, num_queries, num_heads, channels)
        None in a forward call.
    compute : dtype
        float64 if one of the float arrays is float64, else float32.
    level_arrays : tuple of (ndarray or None)
        What spatial_shapes and level_start_index were read from, None where that was no array. Only the
        overlap check of ``out`` looks at them.
    """

    shapes: Shapes
    value: NDArray[Any]
    sampling_locations: NDArray[Any]
    attention_weights: NDArray[Any]
    grad_output: NDArray[Any] | None
    compute: np.dtype[Any]
    level_arrays: tuple[NDArray[Any] | None, NDArray[Any] | None]


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return which of `FLOAT_NAMES` a dtype is, in either byte order, or None."""
    name = _NAME_BY_NUM.get(dtype.num)
    if name is None and dtype.itemsize == 2 and dtype.name == "bfloat16":
        name = "bfloat16"
        # A type that an extension registered has a number of its own from NPY_USERDEF = 256 on.
        if dtype.num >= 256:
            _NAME_BY_NUM[dtype.num] = name
    return name


def listed(names: tuple[str, ...]) -> str:
    """Write out alternatives: a, b or c."""
    return ", ".join(names[:-1]) + " or " + names[-1]


def forward_inputs(
    value: Any,
    spatial_shapes: Any,
    level_start_index: Any,
    sampling_locations: Any,
    attention_weights: Any,
    coordinate_order: Any,
) -> Inputs:
    """Check the inputs of the forward operator."""
    shapes, value, locations, weights, level_arrays = _shared_inputs(
        value, spatial_shapes, level_start_index, sampling_locations, attention_weights, coordinate_order
    )
    compute = _compute_dtype(value.dtype.num, locations.dtype.num, weights.dtype.num)
    return Inputs(shapes, value, locations, weights, None, compute, level_arrays)


def backward_inputs(
    value: Any,
    spatial_shapes: Any,
    level_start_index: Any,
    sampling_locations: Any,
    attention_weights: Any,
    grad_output: Any,
    coordinate_order: Any,
) -> Inputs:
    """Check the inputs of the gradients."""
    shapes, value, locations, weights, level_arrays = _shared_inputs(
        value, spatial_shapes, level_start_index, sampling_locations, attention_weights, coordinate_order
    )
    grad = _float_array("grad_output", grad_output)
    if grad.shape != shapes.output:
        same_length("grad_output", grad.shape, 0, "value", shapes.output[0])
        same_length("grad_output", grad.shape, 1, "sampling_locations", shapes.output[1])
    grad = parted_into_heads("grad_output", grad, *shapes.value[2:])
    compute = _compute_dtype(value.dtype.num, locations.dtype.num, weights.dtype.num, grad.dtype.num)
    return Inputs(shapes, value, locations, weights, grad, compute, level_arrays)


def parted_into_heads(name: str, grad: NDArray[Any], num_heads: int, channels: int) -> NDArray[Any]:
    """Return a view of grad_output as (bs, num_queries, num_heads, channels)."""
    bs, num_queries, width = grad.shape
    if width != num_heads * channels:
        raise ValueError(
            f"{name} has shape {grad.shape}: its last axis is {width}, but num_heads*channels of value is "
            f"{num_heads}*{channels} = {num_heads * channels}"
        )
    # This never needs a copy.
    return grad.reshape(bs, num_queries, num_heads, channels)


def check_wrt(wrt: Any) -> tuple[bool, bool, bool]:
    """Return which gradients are wanted: of value, of sampling_locations, of attention_weights.

    `wrt` is a collection of names or one name alone. The order does not matter, a name may come twice, and
    none at all is fine.
    """
    if wrt is GRADIENT_NAMES:
        return (True, True, True)
    if not isinstance(wrt, (str, tuple, list, set, frozenset)):
        raise TypeError(f"wrt must be a tuple of names out of {GRADIENT_NAMES}, got {described(wrt)}")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"wrt must hold names out of {GRADIENT_NAMES}, got {described(name)} in it")
        if name not in GRADIENT_NAMES:
            raise ValueError(f"wrt must hold names out of {GRADIENT_NAMES}, got {described(name)}")
    return ("value" in names, "sampling_locations" in names, "attention_weights" in names)


def forward_out(out: Any, inputs: Inputs) -> NDArray[Any]:
    """Check the array that the output is to be written to, and return a view of it.

    It has the shape that the caller sees, (bs, num_queries, num_heads*channels).
    """
    axes = "(bs, num_queries, num_heads*channels)"
    return _out_array("out", out, inputs.shapes.output, axes, _input_arrays(inputs))


def backward_out(
    out: Any, wanted: tuple[bool, bool, bool], inputs: Inputs, coordinate_order: str
) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
    """Check the arrays that the gradients are to be written to, and return views of them.

    An entry is None for a gradient that is not wanted, and may be None for one that is: then the caller
    leaves the allocation to us. `wanted` comes from `check_wrt`. The view for sampling_locations is in (x, y)
    order, as the locations of `inputs` are.
    """
    if not isinstance(out, (tuple, list)):
        raise TypeError(
            f"out must be a tuple of three arrays (or None), for {_GRADIENT_LIST}, got {described(out)}"
        )
    entries = tuple(out)
    if len(entries) != 3:
        raise ValueError(f"out must have three entries, for {_GRADIENT_LIST}, got {len(entries)}")
    for label, name, entry, wants in zip(_GRADIENT_LABELS, GRADIENT_NAMES, entries, wanted, strict=True):
        if entry is not None and not wants:
            raise ValueError(f"{label} must be None, since wrt leaves {name} out, got {described(entry)}")
    others = _input_arrays(inputs)
    arrays: list[NDArray[Any] | None] = []
    for label, name, entry in zip(_GRADIENT_LABELS, GRADIENT_NAMES, entries, strict=True):
        array = None
        if entry is not None:
            array = _out_array(label, entry, getattr(inputs, name).shape, f"that of {name}", others)
            others.append((label, array))
        arrays.append(array)
    grad_value, grad_locations, grad_weights = arrays
    if grad_locations is not None and coordinate_order == "yx":
        grad_locations = grad_locations[..., ::-1]
    return grad_value, grad_locations, grad_weights


def _shared_inputs(
    value: Any,
    spatial_shapes: Any,
    level_start_index: Any,
    sampling_locations: Any,
    attention_weights: Any,
    coordinate_order: Any,
) -> tuple[Any, ...]:
    """Check what forward and backward have in common."""
    if not isinstance(coordinate_order, str):
        raise TypeError(f"coordinate_order must be 'xy' or 'yx', got {described(coordinate_order)}")
    if coordinate_order != "xy" and coordinate_order != "yx":
        raise ValueError(f"coordinate_order must be 'xy' or 'yx', got {described(coordinate_order)}")

    value = _float_array("value", value)
    sizes, sizes_array = _integers("spatial_shapes", spatial_shapes)
    starts, starts_array = None, None
    if level_start_index is not None:
        starts, starts_array = _integers("level_start_index", level_start_index)
    locations = _float_array("sampling_locations", sampling_locations)
    weights = _float_array("attention_weights", attention_weights)

    agreed = _agreed if len(sizes) <= 2 * _MOST_LEVELS_KEPT else _agreed.__wrapped__
    shapes = agreed(value.shape, sizes, starts, locations.shape, weights.shape)
    if coordinate_order == "yx":
        locations = locations[..., ::-1]
    return shapes, value, locations, weights, (sizes_array, starts_array)


# All that is left to check depends on these few numbers alone. Programs make the same calls over and over, and a very
# small one takes no longer than these checks.
@functools.lru_cache(maxsize=64)
def _agreed(
    value_shape: tuple[int, ...],
    sizes: tuple[int, ...],
    starts: tuple[int, ...] | None,
    locations_shape: tuple[int, ...],
    weights_shape: tuple[int, ...],
) -> Shapes:
    """Check shapes against each other, and the levels against num_keys."""
    bs, num_keys, num_heads, _ = value_shape
    num_levels = len(sizes) // 2
    if starts is not None and len(starts) != num_levels:
        same_length("level_start_index", (len(starts),), 0, "spatial_shapes", num_levels)
    num_queries, num_points = locations_shape[1], locations_shape[4]
    if locations_shape != (bs, num_queries, num_heads, num_levels, num_points, 2):
        same_length("sampling_locations", locations_shape, 0, "value", bs)
        same_length("sampling_locations", locations_shape, 2, "value", num_heads)
        same_length("sampling_locations", locations_shape, 3, "spatial_shapes", num_levels)
        raise ValueError(
            f"sampling_locations has shape {locations_shape}: its last axis must hold 2 coordinates, "
            f"got {locations_shape[5]}"
        )
    if weights_shape != locations_shape[:5]:
        same_length("attention_weights", weights_shape, 0, "value", bs)
        same_length("attention_weights", weights_shape, 1, "sampling_locations", num_queries)
        same_length("attention_weights", weights_shape, 2, "value", num_heads)
        same_length("attention_weights", weights_shape, 3, "spatial_shapes", num_levels)
        same_length("attention_weights", weights_shape, 4, "sampling_locations", num_points)
    return Shapes(value_shape, weights_shape, gather_levels(sizes, starts, num_keys))


def _compute_dtype(*nums: int) -> np.dtype[Any]:
    """Return the dtype of the arithmetic, from the numbers of the dtypes of the arrays."""
    return _FLOAT64 if _FLOAT64.num in nums else _FLOAT32


def same_length(name: str, shape: tuple[int, ...], axis: int, other: str, expected: int) -> None:
    """Raise unless an axis is as long as the axis of the same name of another argument."""
    if shape[axis] != expected:
        raise ValueError(
            f"{name} has shape {shape}: its {AXES[name][axis]} (axis {axis}) is {shape[axis]}, "
            f"but that of {other} is {expected}"
        )


# One argument by itself


def _float_array(name: str, given: Any) -> NDArray[Any]:
    """Read a float argument, without a copy where it lies in memory that NumPy can see."""
    array = given.view() if type(given) is np.ndarray else provided(name, given)
    if array.dtype.num not in _NAME_BY_NUM and dtype_name(array.dtype) is None:
        refuse_dtype(name, given, array, f"a {listed(FLOAT_NAMES)} array")
    if array.ndim != _RANKS[name]:
        refuse_rank(name, array.shape)
    return array


def _integers(name: str, given: Any) -> tuple[tuple[int, ...], NDArray[Any] | None]:
    """Read spatial_shapes or level_start_index: the numbers in order, and the array if they came in one."""
    by_item = False  # lists are, since their dtype is object
    if type(given) is np.ndarray:
        array = given.view()
    elif isinstance(given, (list, tuple)):
        # As objects, since the dtypes that NumPy finds for a list lose what we must see: 2**63 beside -1 is
        # float64, True beside 2 is int64, and no numbers at all are float64.
        by_item, array = True, provided(name, given, dtype=object)
        if array.shape == (0,):
            return (), None
    else:
        array = provided(name, given)
    if not by_item and array.dtype.kind not in "iu":
        refuse_dtype(name, given, array, "an integer array")
    shape = array.shape
    if len(shape) != _RANKS[name]:
        refuse_rank(name, shape)
    if len(shape) == 2 and shape[1] != 2:
        raise ValueError(f"{name} must have shape (num_levels, 2), rows of (H, W), got shape {shape}")
    numbers = array.ravel().tolist()
    if by_item:
        return tuple([_integer(name, item) for item in numbers]), None
    return tuple(numbers), array


def _integer(name: str, item: Any) -> int:
    """Read an element of a list."""
    number, _ = exact_integer(item)
    if number is None:
        raise TypeError(f"{name} must hold integers, got {described(item)} in it")
    if number.bit_length() > 64:
        raise ValueError(f"{name} must hold 64-bit integers, got one of {number.bit_length()} bits")
    return number


def exact_integer(given: Any) -> tuple[int | None, Exception | None]:
    """Return an integer that is no bool, or None and what the object's own ``__index__`` raised, if anything."""
    if type(given) is int:  # outside of a try: what a signal handler raises is not ours to catch
        return given, None
    # By name, since NumPy has a bool of its own, which NumPy 2.0 takes for an index.
    if type(given).__name__ == "bool":
        return None, None
    try:
        return operator.index(given), None
    except Exception as error:
        return None, error


def gather_levels(
    sizes: Sequence[int],
    starts: Sequence[int] | None,
    num_keys: int,
    names: tuple[str, str] = ("spatial_shapes", "level_start_index"),
) -> NDArray[np.int64]:
    """Check the numbers that say where each level lies, and gather them: height, width, start.

    `sizes` holds height, width, height, width, ...
    """
    sizes_name, starts_name = names
    gathered: list[int] = []
    total = 0
    for k, (height, width) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
        if not (0 <= height <= _INT64_MAX and 0 <= width <= _INT64_MAX):
            raise ValueError(
                f"{sizes_name}[{k}] is ({height}, {width}): height and width must be from 0 to {_INT64_MAX}"
            )
        area = height * width
        start = total if starts is None else starts[k]
        if starts is not None and not 0 <= start <= num_keys - area:
            if start < 0:
                raise ValueError(f"{starts_name}[{k}] is {start}: it must be 0 or more")
            raise ValueError(
                f"level {k} reaches beyond value: {starts_name}[{k}] + H*W of {sizes_name}[{k}] is "
                f"{start} + {height}*{width} = {start + area}, but num_keys (axis 1 of value) is {num_keys}"
            )
        gathered.extend((height, width, start))
        total += area
    if starts is None and total != num_keys:
        raise ValueError(
            f"with {starts_name} None, the H*W of {sizes_name} must add up to num_keys: they add up to "
            f"{total}, but num_keys (axis 1 of value) is {num_keys}"
        )
    levels = np.array(gathered, dtype=np.int64).reshape(-1, 3)
    levels.flags.writeable = False
    return levels


def provided(name: str, given: Any, dtype: Any = None) -> NDArray[Any]:
    """Turn anything that NumPy can read into an array; what its provider raises becomes a TypeError."""
    try:
        if hasattr(given, "__dlpack__") and not hasattr(given, "__array__"):
            array = np.from_dlpack(given)
        else:
            array = np.asanyarray(given, dtype)
        if type(array) is not np.ndarray:
            masked = isinstance(array, np.ma.MaskedArray)
            array = np.asarray(array)
        else:
            masked = False
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"{name} must be an array, got {described(given)}, which cannot be read as one "
            f"({type(error).__name__}: {error})"
        ) from error
    if masked:
        raise TypeError(
            f"{name} must be a plain array, got a masked array, whose mask would be lost: use filled()"
        )
    return array.view()


def refuse_dtype(name: str, given: Any, array: NDArray[Any], expected: str) -> NoReturn:
    if array.ndim == 0 and array.dtype.kind == "O":
        raise TypeError(f"{name} must be {expected}, got {described(given)}")
    advice = "; convert it first, with astype" if array.dtype.kind in "biuf" else ""
    raise TypeError(f"{name} must be {expected}, got dtype {array.dtype}{advice}")


def refuse_rank(name: str, shape: tuple[int, ...]) -> NoReturn:
    axes = AXES[name]
    expected = "(" + ", ".join(axes) + ("," if len(axes) == 1 else "") + ")"
    axis_word = "axis" if len(axes) == 1 else "axes"
    raise ValueError(f"{name} must have {len(axes)} {axis_word}, {expected}, got shape {shape}")


def described(given: Any) -> str:
    """Name an object of an unexpected type, with its value where that is short."""
    if (
        given is None
        or isinstance(given, float)
        or (isinstance(given, int) and given.bit_length() <= 64)
        or (isinstance(given, (str, bytes)) and len(given) <= 40)
    ):
        return repr(given)
    return f"an object of type {type(given).__name__}"


# Outputs


def _input_arrays(inputs: Inputs) -> list[tuple[str, NDArray[Any]]]:
    """Return the arrays that the caller passed, by name."""
    named = [
        ("value", inputs.value),
        ("spatial_shapes", inputs.level_arrays[0]),
        ("level_start_index", inputs.level_arrays[1]),
        ("sampling_locations", inputs.sampling_locations),
        ("attention_weights", inputs.attention_weights),
        ("grad_output", inputs.grad_output),
    ]
    return [(name, array) for name, array in named if array is not None]


def _out_array(
    label: str, given: Any, shape: tuple[int, ...], axes: str, others: list[tuple[str, NDArray[Any]]]
) -> NDArray[Any]:
    """Check one output array, which must not meet any of the others, and return a view of it."""
    array = out_array(label, given)
    check_out_shape(label, array, shape, axes)
    check_out_memory(label, array, others)
    return array


def out_array(label: str, given: Any, accepted: tuple[str, ...] = FLOAT_NAMES) -> NDArray[Any]:
    """Check the type of an output array and its dtype, and return a view of it."""
    if not isinstance(given, np.ndarray):
        raise TypeError(f"{label} must be a NumPy array, got {described(given)}")
    if type(given) is not np.ndarray and isinstance(given, np.ma.MaskedArray):
        raise TypeError(f"{label} must be a plain array, got a masked array: use its data")
    array = np.asarray(given).view()
    if dtype_name(array.dtype) not in accepted:
        raise TypeError(f"{label} must be a {listed(accepted)} array, got dtype {array.dtype}")
    return array


def check_out_shape(label: str, array: NDArray[Any], shape: tuple[int, ...], axes: str) -> None:
    """Check the shape of an output array; `axes` says in words what it should be."""
    if array.shape != shape:
        raise ValueError(f"{label} must have shape {shape}, {axes}, got shape {array.shape}")


def check_out_memory(label: str, array: NDArray[Any], others: list[tuple[str, NDArray[Any]]]) -> None:
    """Check that an output array can be written to without a change to anything else."""
    if _overlaps_itself(label, array):
        raise ValueError(
            f"{label} must not overlap itself, got an array of shape {array.shape} and strides "
            f"{array.strides}, in which elements share memory"
        )
    if not array.flags.writeable:
        raise ValueError(f"{label} must be writeable, got a read-only array")
    for other_label, other in others:
        if share(label, array, other_label, other):
            raise ValueError(f"{label} must not overlap {other_label}, but they share memory")


def share(a_label: str, a: NDArray[Any], b_label: str, b: NDArray[Any]) -> bool:
    """Whether two arrays have a byte in common."""
    try:
        # NumPy compares the bounds first, and looks closer only where those meet.
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except (np.exceptions.TooHardError, OverflowError):
        strides = " and ".join(dict.fromkeys((str(a.strides), str(b.strides))))
        raise ValueError(
            f"{a_label} must not overlap {b_label}, which is too hard to tell for strides {strides}: "
            "use arrays with simpler strides"
        ) from None


def _overlaps_itself(label: str, array: NDArray[Any]) -> bool:
    """Whether two different elements have a byte in common."""
    if array.flags.forc:
        return False
    # Enough for whatever slicing and transposing make: each axis, from the smallest stride up, steps over all
    # that the ones before it reach.
    reach = array.itemsize
    axes = [(abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1]
    for stride, n in sorted(axes):
        if stride == 0:
            return True
        if stride < reach:
            break
        reach += (n - 1) * stride
    else:
        return False
    # Two elements that overlap differ in some axes. Shifted together, one of them has index 0 in the first of
    # these, and both have it in the axes before.
    for axis in range(array.ndim):
        first, rest = np.split(array, [1], axis)
        if share(label, first, "itself", rest):
            return True
        array = first
    return False
