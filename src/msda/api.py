"""forward and backward: check the arguments, plan the call, run a kernel."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from msda import _kernels, arguments, plan, threads
from msda.arguments import Inputs
from msda.gradients import Gradients
from msda.plan import Plan


def forward(
    value: ArrayLike,
    spatial_shapes: ArrayLike,
    level_start_index: ArrayLike | None,
    sampling_locations: ArrayLike,
    attention_weights: ArrayLike,
    *,
    out: NDArray[Any] | None = None,
    num_threads: SupportsIndex | None = None,
    coordinate_order: str = "xy",
) -> NDArray[Any]:
    """Compute multi-scale deformable attention.

    Each head of each query samples its maps of `value`, bilinearly and with zeros outside, at the locations
    given, and adds the samples up with the weights given. The numbers are defined to the last bit: see
    `msda.reference` and the page on numerics.

    Parameters
    ----------
    value : array_like, shape (bs, num_keys, num_heads, channels)
        The maps of all levels, flattened row by row. float16, bfloat16, float32 or float64, as all float
        arrays here; each may have its own dtype, strides and byte order.
    spatial_shapes : array_like of int, shape (num_levels, 2)
        Height and width of each level, in pixels.
    level_start_index : array_like of int, shape (num_levels,), or None
        The key at which each level starts. Levels may leave gaps, overlap and come in any order. None: they
        are packed, one after the other, and use up all keys.
    sampling_locations : array_like, shape (bs, num_queries, num_heads, num_levels, num_points, 2)
        Locations (x, y), normalised: pixel centres of a level of width W lie at x = (column + 0.5) / W.
    attention_weights : array_like, shape (bs, num_queries, num_heads, num_levels, num_points)
        Weights of the samples, used as they are (no softmax).
    out : ndarray, shape (bs, num_queries, num_heads * channels), optional
        Where to put the output: any layout, any of the float dtypes. It must not overlap itself or an input.
    num_threads : int, optional
        How many threads to use, if there is work for so many. By default a small call uses one and others
        what `get_num_threads` gives. The number has no influence on the result.
    coordinate_order : {"xy", "yx"}
        The order of the last axis of `sampling_locations`.

    Returns
    -------
    ndarray, shape (bs, num_queries, num_heads * channels)
        `out` if given, else a new array with the dtype of `value`. It is computed in float64 if an input is
        float64, else in float32, and rounded once.

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype.
    ValueError
        For shapes that do not fit, levels that reach beyond num_keys, and other wrong values.
    MemoryError
        If memory for the output or for scratch arrays runs out.

    Notes
    -----
    After an error `out` is as it was. Only a KeyboardInterrupt may leave anything in it.
    """
    inputs = arguments.forward_inputs(
        value, spatial_shapes, level_start_index, sampling_locations, attention_weights, coordinate_order
    )
    if out is None:
        out = given = _new_array(inputs.shapes.output, inputs.value.dtype)
    else:
        given = arguments.forward_out(out, inputs)
    chosen = plan.forward(inputs, threads.for_call(num_threads, plan.work(inputs)))
    if given.size:
        # Parting an axis in two never copies.
        _run(chosen, inputs, None, given.reshape(inputs.shapes.output_by_head))
    return out


def backward(
    value: ArrayLike,
    spatial_shapes: ArrayLike,
    level_start_index: ArrayLike | None,
    sampling_locations: ArrayLike,
    attention_weights: ArrayLike,
    grad_output: ArrayLike,
    *,
    wrt: str | Collection[str] = arguments.GRADIENT_NAMES,
    out: tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None] | None = None,
    num_threads: SupportsIndex | None = None,
    coordinate_order: str = "xy",
) -> Gradients:
    """Compute the gradients of multi-scale deformable attention.

    Parameters
    ----------
    value, spatial_shapes, level_start_index, sampling_locations, attention_weights
        As in `forward`.
    grad_output : array_like, shape (bs, num_queries, num_heads * channels)
        The gradient of the output.
    wrt : collection of str
        The gradients wanted, out of "value", "sampling_locations" and "attention_weights". What is left out
        is not computed and is None in the result; without "value" the call is faster.
    out : tuple of three ndarrays or None, optional
        Where to put the gradients, in the order of `Gradients`: any layout, any of the float dtypes. None
        where a gradient is not wanted, or is to be put into a new array. They must not overlap themselves,
        each other or an input.
    num_threads, coordinate_order
        As in `forward`; the gradient of `sampling_locations` has the order of its input.

    Returns
    -------
    Gradients
        A named tuple (value, sampling_locations, attention_weights): the arrays of `out` where given, else
        new ones with the dtype of the input that each belongs to.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `forward` does.

    Notes
    -----
    After an error the arrays of `out` are as they were. Only a KeyboardInterrupt may leave anything in them.
    """
    inputs = arguments.backward_inputs(
        value,
        spatial_shapes,
        level_start_index,
        sampling_locations,
        attention_weights,
        grad_output,
        coordinate_order,
    )
    wanted = arguments.check_wrt(wrt)
    views: tuple[NDArray[Any] | None, ...] = (None, None, None)
    if out is not None:
        views = arguments.backward_out(out, wanted, inputs, coordinate_order)
    num_threads = threads.for_call(num_threads, plan.work(inputs))
    chosen = plan.backward(inputs, num_threads, views[0]) if wanted[0] else plan.forward(inputs, num_threads)

    results: list[NDArray[Any] | None] = [None, None, None] if out is None else list(out)
    targets = list(views)
    likes = (inputs.value, inputs.sampling_locations, inputs.attention_weights)
    for k, (wants, like) in enumerate(zip(wanted, likes, strict=True)):
        if wants and targets[k] is None:
            # Rows of the gradient of value that are touched in place start from zero.
            created = _new_array(like.shape, like.dtype, zeros=k == 0 and not chosen.packed)
            results[k] = created
            targets[k] = created[..., ::-1] if k == 1 and coordinate_order == "yx" else created
    gradients = Gradients(*results)
    if any(target is not None and target.size for target in targets):
        _run(chosen, inputs, inputs.grad_output, None, *targets)
    return gradients


#: Bytes from which on a result begins with a cache line, so that the rows of neighbouring heads mostly share none.
_IN_LINES = 1 << 20
_CACHE_LINE = 64  # as in call.pxi
#: Bytes from which on NumPy asks Linux for huge pages. A result then begins with one: what lies in a part of one, Linux
#: clears as hundreds of small pages, each when it is first written to.
_IN_HUGE_PAGES = 1 << 22
_HUGE_PAGE = 1 << 21
#: Where a result would be larger than this, NumPy refuses in its own words.
_MOST_BYTES = 1 << 50


def _new_array(shape: tuple[int, ...], dtype: np.dtype[Any], *, zeros: bool = False) -> NDArray[Any]:
    allocate = np.zeros if zeros else np.empty
    size = math.prod(shape) * dtype.itemsize
    if size < _IN_LINES or size >= _MOST_BYTES:
        return allocate(shape, dtype)
    boundary = _CACHE_LINE if size < _IN_HUGE_PAGES else _HUGE_PAGE
    # A slightly larger array has the memory; it becomes the `base` of the result.
    memory = allocate(size + boundary, np.uint8)
    # memory.ctypes would keep some bytes where a signal handler ends the call.
    return np.ndarray(shape, dtype, memory, -memory.__array_interface__["data"][0] % boundary)


def _run(chosen: Plan, inputs: Inputs, *arrays: NDArray[Any] | None) -> None:
    # `arrays`: that of grad_output and those of the results, as Call takes them. Nothing that can fail may follow the
    # run: a failed call leaves the caller's arrays as they were.
    call = _kernels.Call(chosen, inputs.value, inputs.sampling_locations, inputs.attention_weights, *arrays)
    scratch = np.empty(call.scratch_bytes, np.uint8)
    record = threads.team_record()
    record[0] = call.run(scratch)
