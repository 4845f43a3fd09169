"""The benchmark's workloads, made from integer recipes.

Every number comes from a 64-bit counter-based generator by integer arithmetic and by single float64
operations, which round the same way everywhere. Neither `numpy.random` nor the C library's functions
nor a floating-point sum has a part in it, so the arrays are the same, bit for bit, on every machine and
with every version of NumPy.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_PYRAMID = ((100, 167), (50, 84), (25, 42), (13, 21))


class Workload(NamedTuple):
    """The shapes of one workload."""

    number: int  # fixes the numbers drawn: a workload keeps its own for good
    spatial_shapes: tuple[tuple[int, int], ...]
    num_queries: int | None = None  # None: one query for each key
    near: bool = False  # locations lie around the query's own pixel, else anywhere
    batch: int = 1
    num_heads: int = 8
    channels: int = 32
    num_points: int = 4

    @property
    def num_keys(self) -> int:
        """The pixels of all levels together."""
        return sum(height * width for height, width in self.spatial_shapes)


WORKLOADS = {
    "encoder": Workload(1, _PYRAMID, near=True),
    "encoder_random": Workload(2, _PYRAMID),
    "decoder": Workload(3, _PYRAMID, batch=2, num_queries=300),
    "mask2former": Workload(4, ((32, 32), (64, 64), (128, 128)), near=True),
    "bev": Workload(5, ((200, 200),), near=True),
    "small": Workload(6, ((16, 16), (8, 8)), num_queries=100, num_heads=4, channels=16),
}

_VARIED = ((64, 64), (32, 32), (16, 16))

#: Further workloads, in groups that can be named as a whole.
GROUPS = {
    # shapes that occur less often
    "unusual": {
        "channels_8": Workload(7, _VARIED, near=True, channels=8),
        "channels_13": Workload(8, _VARIED, near=True, channels=13),
        "channels_16": Workload(9, _VARIED, near=True, channels=16),
        "channels_71": Workload(10, _VARIED, near=True, channels=71),
        "channels_256": Workload(11, _VARIED, near=True, channels=256),
        "points_1": Workload(12, _VARIED, near=True, num_points=1),
        "points_16": Workload(13, _VARIED, near=True, num_points=16),
        "levels_1": Workload(14, _VARIED[:1], near=True),
        "levels_16": Workload(15, 16 * ((16, 16),), near=True),
    },
    # the same work on maps of 32 KiB to 20 MiB for each head: how the caches tell
    "maps": {
        "map_16": Workload(16, ((16, 16),), num_queries=20000),
        "map_32": Workload(17, ((32, 32),), num_queries=20000),
        "map_64": Workload(18, ((64, 64),), num_queries=20000),
        "map_128": Workload(19, ((128, 128),), num_queries=20000),
        "map_200": Workload(20, ((200, 200),), num_queries=20000),
        "map_400": Workload(21, ((400, 400),), num_queries=20000),
    },
}

#: All of them by name.
ALL = WORKLOADS | GROUPS["unusual"] | GROUPS["maps"]


def make(name: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of the workload `name`, one of `ALL`, by the names and in the order of `msda.backward`.

    value and grad_output are approximately standard normal. Locations are uniform in [0, 1), or the
    centre of the query's own pixel plus an approximately normal offset of 3 pixels of each level.
    Weights are uniform, then normalised over levels and points. Floats are float32.
    """
    workload = ALL[name]
    shapes = np.array(workload.spatial_shapes, dtype=np.int64)
    sizes = shapes.prod(axis=1)
    num_queries = workload.num_keys if workload.num_queries is None else workload.num_queries
    samples = (workload.batch, num_queries, workload.num_heads, len(shapes), workload.num_points)
    value, locations, weights, grad_output = (10 * workload.number + stream for stream in range(4))

    if workload.near:
        offsets = _drawn(locations, (*samples, 2), _normal)
        width_height = shapes[:, ::-1].astype(np.float64)
        pixels_3 = 3.0 / width_height[:, np.newaxis, :]
        near = offsets * pixels_3
        near += _pixel_centres(workload.spatial_shapes)[:, np.newaxis, np.newaxis, np.newaxis, :]
        sampling_locations = near.astype(np.float32)
    else:
        sampling_locations = _drawn(locations, (*samples, 2), _uniform)

    return {
        "value": _drawn(
            value, (workload.batch, workload.num_keys, workload.num_heads, workload.channels), _normal
        ),
        "spatial_shapes": shapes,
        "level_start_index": np.cumsum(sizes) - sizes,
        "sampling_locations": sampling_locations,
        "attention_weights": _weights(weights, samples),
        "grad_output": _drawn(
            grad_output, (workload.batch, num_queries, workload.num_heads * workload.channels), _normal
        ),
    }


def splitmix64(seed: int, count: int, first: int = 0) -> NDArray[Any]:
    """Return `count` outputs of the generator SplitMix64 seeded with `seed`, from output `first` on."""
    words = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    words *= 0x9E37_79B9_7F4A_7C15
    words += seed
    words ^= words >> 30
    words *= 0xBF58_476D_1CE4_E5B9
    words ^= words >> 27
    words *= 0x94D0_49BB_1331_11EB
    words ^= words >> 31
    return words


_BLOCK = 1 << 15  # outputs at a time, so that they stay in the cache


def _drawn(
    stream: int,
    shape: tuple[int, ...],
    convert: Callable[[NDArray[Any]], NDArray[Any]],
    dtype: type[np.generic] = np.float32,
) -> NDArray[Any]:
    """Return an array of one number for each output of the generator's stream `stream`."""
    # Outputs for the seed 0 as seeds: they lie far apart in the one sequence that all seeds share.
    seed = int(splitmix64(0, 1, first=stream)[0])
    numbers = np.empty(math.prod(shape), dtype=dtype)
    for begin in range(0, numbers.size, _BLOCK):
        part = numbers[begin : begin + _BLOCK]
        part[:] = convert(splitmix64(seed, part.size, first=begin))
    return numbers.reshape(shape)


def _uniform(words: NDArray[Any]) -> NDArray[Any]:
    """Uniform in [0, 1): the upper 24 bits, which float32 holds exactly."""
    return (words >> 40) * 2.0**-24


def _normal(words: NDArray[Any]) -> NDArray[Any]:
    """Approximately standard normal: the sum of a word's four 16-bit parts, centred and scaled."""
    pairs = (words & 0x0000_FFFF_0000_FFFF) + ((words >> 16) & 0x0000_FFFF_0000_FFFF)
    sums = ((pairs & 0xFFFF_FFFF) + (pairs >> 32)).astype(np.int64)
    # A part has the mean 65535 / 2 and the variance (2**32 - 1) / 12.
    return (sums - 2 * 65535) * 2.6428997921303018e-05


def _weights(stream: int, samples: tuple[int, ...]) -> NDArray[Any]:
    """Uniform in (0, 1], then divided by their sum over levels and points; the sum is one of integers."""
    parts = _drawn(stream, samples, lambda words: (words >> 40) + 1, np.int64)
    normalised: NDArray[Any] = parts / parts.sum(axis=(-2, -1), keepdims=True)
    return normalised.astype(np.float32)


def _pixel_centres(spatial_shapes: tuple[tuple[int, int], ...]) -> NDArray[Any]:
    """Return the centres (x, y) of all pixels, level by level and row by row, normalised."""
    centres = []
    for height, width in spatial_shapes:
        y, x = np.indices((height, width)).reshape(2, -1)
        centres.append(np.stack(((x + 0.5) / width, (y + 0.5) / height), axis=-1))
    return np.concatenate(centres)
