"""Problems made from integer recipes: the same bits on every machine and with every version of every library.

Numbers are integers drawn from a counter-based generator, scaled by a power of two or divided once. Neither
`numpy.random` nor a function of the C library has a part in them. NumPy and msda are all that this file needs.
"""

import numpy as np

from compare import Problem, dtype_of
from msda.cli.workloads import splitmix64

_PYRAMID = ((20, 33), (10, 17), (5, 8), (3, 4))


def _words(seed, shape):
    """Draw 64-bit integers; each seed gives a sequence of its own."""
    start = int(splitmix64(0, 1, first=seed)[0])
    return splitmix64(start, int(np.prod(shape, dtype=np.int64))).reshape(shape)


def _numbers(seed, shape, digits=24):
    """Draw numbers in [-2, 2) of so many binary digits."""
    integers = (_words(seed, shape) >> (64 - digits)).astype(np.int64) - 2 ** (digits - 1)
    return integers * 2.0 ** (2 - digits)


def _locations(seed, shape, shapes):
    """Draw locations around the maps, about every sixteenth on the centre or the border of a pixel."""
    words = _words(seed, shape)
    locations = (words >> 32) * (1.5 * 2.0**-32) - 0.25
    sizes = np.maximum(shapes[:, np.newaxis, ::-1], 1)
    halves = ((words >> 8) & 0xFFFF).astype(np.int64) % (2 * sizes + 3) - 1
    return np.where(words & 15 == 0, halves / (2 * sizes), locations)


def _problem(
    seed,
    shapes,
    starts=None,
    num_keys=None,
    *,
    bs=1,
    heads=2,
    channels=32,
    queries=200,
    points=4,
    dtypes="float32",
):
    shapes = np.array(shapes, np.int64).reshape(-1, 2)
    if num_keys is None:
        num_keys = int(shapes.prod(axis=1).sum())
    dtypes = [dtype_of(name) for name in ((dtypes,) * 4 if isinstance(dtypes, str) else dtypes)]
    samples = (bs, queries, heads, len(shapes), points)
    return Problem(
        _numbers(4 * seed, (bs, num_keys, heads, channels)).astype(dtypes[0]),
        shapes,
        starts,
        _locations(4 * seed + 1, (*samples, 2), shapes).astype(dtypes[1]),
        _numbers(4 * seed + 2, samples).astype(dtypes[2]),
        _numbers(4 * seed + 3, (bs, queries, heads * channels)).astype(dtypes[3]),
    )


def _of_every_magnitude(problem):
    """Scale numbers to all magnitudes, subnormal ones above all, by powers of two."""
    scaled = {}
    for k, name in enumerate(("value", "attention_weights", "grad_output")):
        array = getattr(problem, name)
        tiny = np.finfo(array.dtype).tiny
        powers = _words(1000 + k, array.shape) >> 58  # 0..63
        factors = (np.uint64(1) << powers).astype(array.dtype)
        scaled[name] = array * tiny * np.where(powers < 32, 2, factors)
        if name != "value":
            # Half of the numbers are left as they are, so that not all products vanish.
            scaled[name] = np.where(_words(1010 + k, array.shape) >> 63 == 0, scaled[name], array)
    return problem._replace(**scaled)


def _with_odd_numbers(problem):
    """Put NaN, infinities, the largest number and zeros of both signs among the others."""
    largest = np.finfo(problem.value.dtype).max
    odd = np.array([np.nan, np.inf, -np.inf, largest, -largest, 0.0, -0.0, np.nan])
    arrays = {}
    for k, name in enumerate(("value", "sampling_locations", "attention_weights", "grad_output")):
        array = getattr(problem, name)
        words = _words(2000 + k, array.shape)
        arrays[name] = np.where(words >> 57 == 0, odd[words & 7], array).astype(array.dtype)
    return problem._replace(**arrays)


def _large_mean(problem):
    return problem._replace(value=problem.value + problem.value.dtype.type(4096))


#: Name: a function that makes the problem. A problem keeps its seed for good.
PROBLEMS = {
    "float32": lambda: _problem(1, _PYRAMID, bs=2, heads=8),
    "float64": lambda: _problem(2, _PYRAMID, bs=2, heads=8, dtypes="float64"),
    "float16": lambda: _problem(3, _PYRAMID, heads=4, dtypes="float16"),
    "bfloat16": lambda: _problem(4, _PYRAMID, heads=4, dtypes="bfloat16"),
    "mixed dtypes in float32": lambda: _problem(
        5, _PYRAMID, dtypes=("float16", "float32", "float16", "float32")
    ),
    "mixed dtypes in float64": lambda: _problem(
        6, _PYRAMID, dtypes=("float16", "float64", "float32", "float16")
    ),
    "mixed with bfloat16": lambda: _problem(
        7, _PYRAMID, dtypes=("bfloat16", "float32", "float16", "float64")
    ),
    "71 channels": lambda: _problem(8, _PYRAMID, channels=71),
    "13 channels in float64": lambda: _problem(9, _PYRAMID, channels=13, dtypes="float64"),
    "1 channel": lambda: _problem(10, _PYRAMID, channels=1, heads=9),
    "300 channels": lambda: _problem(11, _PYRAMID, channels=300, queries=60),
    "three blocks of queries": lambda: _problem(12, _PYRAMID, channels=5, heads=1, queries=33001, points=1),
    "two blocks in float64": lambda: _problem(
        13, ((9, 14), (5, 7)), channels=3, bs=2, heads=1, queries=16385, points=2, dtypes="float64"
    ),
    "overlapping levels in two blocks": lambda: _problem(
        14, _PYRAMID, (100, 20, 700, 0), 812, channels=6, heads=1, queries=16500, points=1
    ),
    "odd maps": lambda: _problem(15, ((1, 1), (1, 40), (0, 7), (40, 1), (2, 3), (7, 0)), bs=3, points=3),
    "few queries on a large map": lambda: _problem(16, ((150, 201),), channels=24, queries=40),
    "many levels and points": lambda: _problem(
        17, [(k, 18 - k) for k in range(1, 18)], queries=30, points=19
    ),
    "large mean": lambda: _large_mean(_problem(18, _PYRAMID)),
    "every magnitude in float32": lambda: _of_every_magnitude(_problem(19, _PYRAMID, channels=37)),
    "every magnitude in float64": lambda: _of_every_magnitude(
        _problem(20, _PYRAMID, channels=37, dtypes="float64")
    ),
    "odd numbers in float32": lambda: _with_odd_numbers(_problem(21, _PYRAMID, channels=21)),
    "odd numbers in float64": lambda: _with_odd_numbers(
        _problem(22, _PYRAMID, channels=21, dtypes="float64")
    ),
    "odd numbers in float16": lambda: _with_odd_numbers(
        _problem(23, _PYRAMID, channels=21, dtypes="float16")
    ),
}
