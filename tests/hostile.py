"""Arrays that hold the right numbers in awkward memory.

`hostile` gives variants of an input, `hostile_out` arrays to write a result to, and `gaps_intact` tells
whether a write to one of the latter stayed inside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_GARBAGE = 0xA5
_SEED = 20  # of the mixed layouts; fixed, so that a failing label means the same array next time


class _Layout(NamedTuple):
    """Where the elements of an array lie in a buffer of bytes."""

    nbytes: int
    offset: int
    strides: tuple[int, ...]


def hostile(array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (label, variant) pairs: arrays equal to `array` in shape and bits, each in another layout.

    The dtype is the same but for its byte order.
    """
    for label, variant in _empty(array.shape, array.dtype):
        variant[...] = array
        yield label, variant
    yield "read-only", _read_only(array.copy())
    yield "read-only, unaligned", _read_only(_filled(array, _layout(array.shape, array.itemsize, offset=1)))
    if array.size:
        with tempfile.TemporaryFile() as file:
            file.write(np.ascontiguousarray(array).tobytes())
            file.flush()
            mapped = np.memmap(file, np.uint8, mode="r").view(array.dtype).reshape(array.shape)
        yield "memory-mapped, read-only", mapped
    yield from _constant_axes(array)


def hostile_out(shape: tuple[int, ...], dtype: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (label, out) pairs: arrays filled with garbage, in layouts of which none overlaps itself."""
    yield from _empty(shape, np.dtype(dtype))


def gaps_intact(out: NDArray[Any]) -> bool:
    """Tell whether the garbage around and between the elements of a `hostile_out` array is still there."""
    buffer = _buffer_of(out)
    untouched = np.ones(buffer.shape, bool)
    offset = out.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
    if out.size:
        np.ndarray((*out.shape, out.itemsize), bool, untouched, offset, (*out.strides, 1))[...] = False
    return bool(np.all(buffer[untouched] == _GARBAGE))


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (label, array) pairs, all writeable and full of garbage."""
    swapped = dtype.newbyteorder("S")
    for label, layout in _layouts(shape, dtype.itemsize):
        yield label, _allocated(shape, dtype, layout)
    for label, layout in _layouts(shape, dtype.itemsize):
        if label in ("contiguous", "unaligned", "mixed 0", "mixed 1"):
            yield f"{label}, byte-swapped", _allocated(shape, swapped, layout)
    if np.prod(shape, dtype=object):
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        with tempfile.TemporaryFile() as file:
            mapped = np.memmap(file, np.uint8, mode="w+", shape=(nbytes,))
        mapped[...] = _GARBAGE
        yield "memory-mapped", mapped.view(dtype).reshape(shape)
    record = np.full(int(np.prod(shape, dtype=object)) * (dtype.itemsize + 3), _GARBAGE, np.uint8)
    fields = np.dtype([("before", "u1"), ("number", dtype), ("after", "u2")])
    yield "field of a packed record", record.view(fields).reshape(shape)["number"]


def _layouts(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[str, _Layout]]:
    ndim = len(shape)
    yield "contiguous", _layout(shape, itemsize)
    yield "unaligned", _layout(shape, itemsize, offset=1)
    yield "Fortran", _layout(shape, itemsize, order=range(ndim))
    yield "first axis innermost", _layout(shape, itemsize, order=[0, *range(ndim - 1, 0, -1)])
    yield "middle axes swapped", _layout(shape, itemsize, order=_swapped(ndim))
    yield "all axes reversed", _layout(shape, itemsize, reverse=range(ndim))
    yield "last axis reversed", _layout(shape, itemsize, reverse=[ndim - 1])
    yield "first axis reversed", _layout(shape, itemsize, reverse=[0])
    yield "every second of the last axis", _layout(shape, itemsize, steps={ndim - 1: 2})
    yield "every third of the first axis", _layout(shape, itemsize, steps={0: 3})
    yield "gaps in every axis", _layout(shape, itemsize, steps=dict.fromkeys(range(ndim), 2))
    yield "strides no multiple of the element", _layout(shape, itemsize, pad=1, offset=3)
    if 0 in shape or 1 in shape:
        yield "odd strides where they do not matter", _odd_idle_strides(shape, itemsize)
    rng = np.random.default_rng(_SEED)
    for k in range(4):
        yield (
            f"mixed {k}",
            _layout(
                shape,
                itemsize,
                order=rng.permutation(ndim),
                reverse=np.flatnonzero(rng.integers(0, 2, ndim)),
                steps={axis: int(rng.integers(1, 4)) for axis in range(ndim)},
                pad=int(rng.integers(0, 2 * itemsize)),
                offset=int(rng.integers(0, 16)),
            ),
        )


def _layout(
    shape: tuple[int, ...],
    itemsize: int,
    *,
    order: Any = None,
    reverse: Any = (),
    steps: Any = None,
    pad: int = 0,
    offset: int = 0,
) -> _Layout:
    """Lay out axes, the innermost first in `order`, so that nothing overlaps.

    `steps` leaves gaps along an axis as a slice with that step does, `pad` bytes after each element.
    """
    ndim = len(shape)
    steps = steps or {}
    strides = [0] * ndim
    extent = itemsize + pad
    for axis in range(ndim - 1, -1, -1) if order is None else order:
        strides[axis] = extent * steps.get(int(axis), 1)
        extent = strides[axis] * max(shape[axis], 1)
    start = offset
    for axis in reverse:
        start += strides[axis] * max(shape[axis] - 1, 0)
        strides[axis] = -strides[axis]
    # Some garbage after the end too, so that a write beyond it is seen.
    return _Layout(extent + offset + 64, start, tuple(strides))


def _odd_idle_strides(shape: tuple[int, ...], itemsize: int) -> _Layout:
    """Lay out contiguously, but with absurd strides in axes of length 1, or in all if nothing is there."""
    layout = _layout(shape, itemsize)
    idle = [n <= 1 or 0 in shape for n in shape]
    strides = [
        (2**40 + 1) * (-1) ** axis if idle[axis] else stride for axis, stride in enumerate(layout.strides)
    ]
    return layout._replace(strides=tuple(strides))


def _swapped(ndim: int) -> list[int]:
    """Return the C order of axes, innermost first, with axes 1 and 2 (queries or keys, and heads) swapped."""
    order = list(range(ndim - 1, -1, -1))
    if ndim >= 3:
        order[-2], order[-3] = order[-3], order[-2]
    return order


def _allocated(shape: tuple[int, ...], dtype: np.dtype[Any], layout: _Layout) -> NDArray[Any]:
    buffer = np.full(layout.nbytes, _GARBAGE, np.uint8)
    return np.ndarray(shape, dtype, buffer, layout.offset, layout.strides)


def _filled(array: NDArray[Any], layout: _Layout) -> NDArray[Any]:
    variant = _allocated(array.shape, array.dtype, layout)
    variant[...] = array
    return variant


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _constant_axes(array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield variants with zero strides along axes on which the numbers do not change."""
    repeated = array
    for axis, n in enumerate(array.shape):
        first = array.take([0], axis=axis) if n else array
        if n > 1 and array.size and np.broadcast_to(first, array.shape).tobytes() == array.tobytes():
            yield f"axis {axis} broadcast", np.broadcast_to(first, array.shape)
            repeated = repeated.take([0], axis=axis)
    if repeated.shape != array.shape:
        yield "all constant axes broadcast", np.broadcast_to(repeated, array.shape)


def _buffer_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes that an array from `hostile_out` was made of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return np.asarray(array).view(np.uint8)
