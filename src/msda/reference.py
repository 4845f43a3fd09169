"""The definition of the numbers, in plain NumPy.

What ``msda.forward`` and ``msda.backward`` compute is what this file computes, bit for bit: every rounding
and the order of every sum are part of it. It is written to be read and makes no attempt to be fast.
docs/numerics.md says the same in words.

The private functions work on one head of one batch element and one block of queries, all levels together.
Shapes are written with Q queries, L levels, P points, K keys, C channels; the axis of length 4 holds a
sample's corners in the order (y0, x0), (y0, x0 + 1), (y0 + 1, x0), (y0 + 1, x0 + 1).
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from msda import arguments
from msda.gradients import Gradients

__all__ = [
    "NUMERICS_VERSION",
    "QUERY_BLOCK",
    "backward",
    "forward",
    "lanes",
    "query_block_count",
    "query_blocks",
    "round_to",
]

#: The number of this definition. It changes whenever the bits of any result do.
NUMERICS_VERSION = 1

#: A query block has at most this many queries.
QUERY_BLOCK = 16384


def forward(
    value: ArrayLike,
    spatial_shapes: ArrayLike,
    level_start_index: ArrayLike | None,
    sampling_locations: ArrayLike,
    attention_weights: ArrayLike,
    *,
    coordinate_order: str = "xy",
) -> NDArray[Any]:
    """Compute what ``msda.forward`` computes, slowly.

    Parameters
    ----------
    value, spatial_shapes, level_start_index, sampling_locations, attention_weights, coordinate_order
        As in ``msda.forward``.

    Returns
    -------
    ndarray
        The output, of shape (bs, num_queries, num_heads * channels) and ``value``'s dtype.
    """
    given = arguments.forward_inputs(
        value, spatial_shapes, level_start_index, sampling_locations, attention_weights, coordinate_order
    )
    bs, _, num_heads, channels = given.value.shape
    num_queries = given.sampling_locations.shape[1]
    output = np.zeros((bs, num_queries, num_heads, channels), given.compute)

    with np.errstate(all="ignore"):
        for batch, head, queries in _items(bs, num_heads, num_queries):
            samples = _geometry(
                given.sampling_locations[batch, queries, head], given.shapes.levels, given.compute
            )
            corners = _corners(given.value[batch, :, head].astype(given.compute), samples)
            sampled = _interpolate(corners, samples)
            attention = given.attention_weights[batch, queries, head].astype(given.compute)
            output[batch, queries, head] = _weighted_sum(sampled.value, attention, samples)
        return round_to(output.reshape(bs, num_queries, num_heads * channels), given.value.dtype)


def backward(
    value: ArrayLike,
    spatial_shapes: ArrayLike,
    level_start_index: ArrayLike | None,
    sampling_locations: ArrayLike,
    attention_weights: ArrayLike,
    grad_output: ArrayLike,
    *,
    wrt: Collection[str] = ("value", "sampling_locations", "attention_weights"),
    coordinate_order: str = "xy",
) -> Gradients:
    """Compute what ``msda.backward`` computes, slowly.

    Parameters
    ----------
    value, spatial_shapes, level_start_index, sampling_locations, attention_weights, grad_output, wrt, \
coordinate_order
        As in ``msda.backward``.

    Returns
    -------
    Gradients
        The gradients named in `wrt`, each with the dtype of its input, and None in the place of the others.
    """
    given = arguments.backward_inputs(
        value,
        spatial_shapes,
        level_start_index,
        sampling_locations,
        attention_weights,
        grad_output,
        coordinate_order,
    )
    want_value, want_locations, want_weights = arguments.check_wrt(wrt)
    assert given.grad_output is not None
    bs, _, num_heads, _ = given.value.shape
    num_queries = given.sampling_locations.shape[1]
    grad_value = np.zeros(given.value.shape, given.compute)
    grad_locations = np.zeros(given.sampling_locations.shape, given.compute)
    grad_weights = np.zeros(given.attention_weights.shape, given.compute)

    with np.errstate(all="ignore"):
        for batch, head, queries in _items(bs, num_heads, num_queries):
            samples = _geometry(
                given.sampling_locations[batch, queries, head], given.shapes.levels, given.compute
            )
            attention = given.attention_weights[batch, queries, head].astype(given.compute)
            grad_head = given.grad_output[batch, queries, head].astype(given.compute)
            if want_value:
                grad_value[batch, :, head] += _scatter(grad_value.shape[1], grad_head, attention, samples)
            if want_locations or want_weights:
                corners = _corners(given.value[batch, :, head].astype(given.compute), samples)
                dots = _dots(_interpolate(corners, samples), grad_head)
                grad_weights[batch, queries, head] = _where_counting(dots.value, samples)
                grad_locations[batch, queries, head, ..., 0] = _where_counting(
                    (attention * samples.width) * dots.x_derivative, samples
                )
                grad_locations[batch, queries, head, ..., 1] = _where_counting(
                    (attention * samples.height) * dots.y_derivative, samples
                )

        if coordinate_order == "yx":
            grad_locations = grad_locations[..., ::-1]
        return Gradients(
            round_to(grad_value, given.value.dtype) if want_value else None,
            round_to(grad_locations, given.sampling_locations.dtype) if want_locations else None,
            round_to(grad_weights, given.attention_weights.dtype) if want_weights else None,
        )


def query_block_count(num_queries: int) -> int:
    """Give the number of `query_blocks`."""
    return -(-num_queries // QUERY_BLOCK)


def query_blocks(num_queries: int) -> list[tuple[int, int]]:
    """Cut the queries into nearly equal blocks of at most ``QUERY_BLOCK``.

    Contributions to a gradient of ``value`` are summed within each block first, then over the blocks.

    Parameters
    ----------
    num_queries : int

    Returns
    -------
    list of (begin, end)
        Block after block, in ascending order; empty where there are no queries.
    """
    blocks = query_block_count(num_queries)
    return [(i * num_queries // blocks, (i + 1) * num_queries // blocks) for i in range(blocks)]


def lanes(compute: DTypeLike) -> int:
    """Give the number of partial sums of a dot product: 16 in float32, 8 in float64."""
    return 64 // np.dtype(compute).itemsize


def round_to(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Round float32 or float64 numbers once to a float dtype, to nearest, ties to even.

    Parameters
    ----------
    array : ndarray
        float32 or float64.
    dtype : dtype-like
        float16, bfloat16 (an extension dtype of that name), float32 or float64, in either byte order.

    Returns
    -------
    ndarray
        A new, contiguous array of that dtype. What is too large becomes an infinity; every NaN stays a NaN.
    """
    dtype = np.dtype(dtype)
    with np.errstate(all="ignore"):
        if arguments.dtype_name(dtype) == "bfloat16":
            # bfloat16 is the upper half of a float32. Conversions of float64 that others offer round to
            # float32 first, and so twice.
            return _upper_half(_to_odd_float32(array)).astype(f"{dtype.byteorder}u2").view(dtype)
        return array.astype(dtype)


def _to_odd_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Convert to float32, what is inexact to that one of its two neighbours whose last bit is 1.

    Rounding the result to at least two bits less gives what rounding the original would.
    """
    nearest = array.astype(np.float32)
    bits = nearest.view(np.uint32)
    # A float's bits, less one, are those of the next float towards zero; of infinity, the largest float.
    towards_zero = np.where(np.abs(nearest).astype(array.dtype) > np.abs(array), bits - np.uint32(1), bits)
    inexact = nearest.astype(array.dtype) != array
    return np.where(inexact & ~np.isnan(array), towards_zero | np.uint32(1), towards_zero).view(np.float32)


def _upper_half(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the bits of bfloat16, to nearest even."""
    bits = array.view(np.uint32)
    last = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + last) >> np.uint32(16)
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def _items(bs: int, num_heads: int, num_queries: int) -> Iterator[tuple[int, int, slice]]:
    """Go through batch elements, heads and query blocks, blocks ascending."""
    for batch in range(bs):
        for head in range(num_heads):
            for begin, end in query_blocks(num_queries):
                yield batch, head, slice(begin, end)


class _Samples(NamedTuple):
    """Where the samples lie."""

    counts: NDArray[np.bool_]  # (Q, L, P): the sample adds to the results
    dx: NDArray[Any]  # (Q, L, P), compute dtype: distance from column x0
    dy: NDArray[Any]  # (Q, L, P), compute dtype: distance from row y0
    width: NDArray[Any]  # (L, 1), compute dtype
    height: NDArray[Any]  # (L, 1), compute dtype
    inside: NDArray[np.bool_]  # (Q, L, P, 4): the sample counts and the corner is a pixel of the map
    keys: NDArray[np.int64]  # (Q, L, P, 4): the corner's row of value, where inside


def _geometry(locations: NDArray[Any], levels: NDArray[np.int64], compute: np.dtype[Any]) -> _Samples:
    """Work out positions, in float64 whatever the compute dtype, and corners of samples (Q, L, P, 2)."""
    height, width, start = levels[:, :, np.newaxis].swapaxes(0, 1)  # each (L, 1), int64
    x = locations[..., 0].astype(np.float64) * width.astype(np.float64) - 0.5
    y = locations[..., 1].astype(np.float64) * height.astype(np.float64) - 0.5
    # A comparison with NaN is false.
    counts = (x > -1) & (x < width.astype(np.float64)) & (y > -1) & (y < height.astype(np.float64))
    counts &= (height > 0) & (width > 0)

    x0 = np.floor(x)
    y0 = np.floor(y)
    columns = np.where(counts, x0, 0).astype(np.int64)[..., np.newaxis] + np.array([0, 1, 0, 1])
    rows = np.where(counts, y0, 0).astype(np.int64)[..., np.newaxis] + np.array([0, 0, 1, 1])
    inside = counts[..., np.newaxis] & (columns >= 0) & (columns < width[..., np.newaxis])
    inside &= (rows >= 0) & (rows < height[..., np.newaxis])
    return _Samples(
        counts,
        (x - x0).astype(compute),
        (y - y0).astype(compute),
        width.astype(compute),
        height.astype(compute),
        inside,
        start[..., np.newaxis] + rows * width[..., np.newaxis] + columns,
    )


def _corners(value: NDArray[Any], samples: _Samples) -> NDArray[Any]:
    """Look up the corners (Q, L, P, 4, C) of value (K, C); outside the map they are 0."""
    corners = np.zeros((*samples.inside.shape, value.shape[1]), value.dtype)
    corners[samples.inside] = value[samples.keys[samples.inside]]
    return corners


class _Sampled(NamedTuple):
    """Something for each sample's value and for its derivatives by the position (x, y), in pixels."""

    value: NDArray[Any]
    x_derivative: NDArray[Any]
    y_derivative: NDArray[Any]


def _interpolate(corners: NDArray[Any], samples: _Samples) -> _Sampled:
    """Interpolate between the corners (Q, L, P, 4, C), for each channel: (Q, L, P, C)."""
    v00, v01, v10, v11 = np.moveaxis(corners, -2, 0)
    dx = samples.dx[..., np.newaxis]
    dy = samples.dy[..., np.newaxis]
    ex = v01 - v00
    fx = v11 - v10
    top = v00 + dx * ex
    bottom = v10 + dx * fx
    down = bottom - top
    return _Sampled(top + dy * down, ex + dy * (fx - ex), down)


def _weighted_sum(sampled: NDArray[Any], attention: NDArray[Any], samples: _Samples) -> NDArray[Any]:
    """Sum samples (Q, L, P, C) over each level's points, then over the levels: (Q, C)."""
    products = _where_counting(attention[..., np.newaxis] * sampled, samples)
    num_queries, num_levels, num_points, channels = products.shape
    total = np.zeros((num_queries, channels), products.dtype)
    for level in range(num_levels):
        level_total = np.zeros_like(total)
        for point in range(num_points):
            level_total += products[:, level, point]
        total += level_total
    return total


def _dots(sampled: _Sampled, grad_output: NDArray[Any]) -> _Sampled:
    """Take the dot products over channels of (Q, L, P, C) with grad_output (Q, C): (Q, L, P)."""
    return _Sampled(*(_sum_channels(array * grad_output[:, np.newaxis, np.newaxis]) for array in sampled))


def _sum_channels(products: NDArray[Any]) -> NDArray[Any]:
    """Sum over the last axis: channel c into lane c mod lanes, ascending, then the lanes in halves."""
    width = lanes(products.dtype)
    sums = np.zeros((*products.shape[:-1], width), products.dtype)
    for begin in range(0, products.shape[-1], width):
        chunk = products[..., begin : begin + width]
        sums[..., : chunk.shape[-1]] += chunk
    while width > 1:
        width //= 2
        sums = sums[..., :width] + sums[..., width:]
    return sums[..., 0]


def _scatter(
    num_keys: int, grad_output: NDArray[Any], attention: NDArray[Any], samples: _Samples
) -> NDArray[Any]:
    """Add each corner's share of grad_output (Q, C) to its row: a buffer (K, C) of this block's own."""
    dx, dy = samples.dx, samples.dy
    weights = np.stack([(1 - dx) * (1 - dy), dx * (1 - dy), (1 - dx) * dy, dx * dy], axis=-1)
    scales = (attention[..., np.newaxis] * weights)[samples.inside]
    queries = np.nonzero(samples.inside)[0]
    buffer = np.zeros((num_keys, grad_output.shape[1]), grad_output.dtype)
    # Boolean indices and nonzero give the corners in ascending (query, level, point, corner) order, and
    # add.at adds one after the other in the order given.
    rows = samples.keys[samples.inside]
    np.add.at(buffer, rows, scales[:, np.newaxis] * grad_output[queries])
    return buffer


def _where_counting(array: NDArray[Any], samples: _Samples) -> NDArray[Any]:
    """Put +0 where a sample does not count: nothing to add to a sum, as sums from +0 on are never -0."""
    counts = samples.counts.reshape(samples.counts.shape + (1,) * (array.ndim - samples.counts.ndim))
    return np.where(counts, array, np.zeros((), array.dtype))
