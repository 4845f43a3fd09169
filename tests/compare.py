"""Comparing results by their bytes, and random problems to compare them on."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import msda
from msda import threads

DTYPES = ("float16", "bfloat16", "float32", "float64")


class Problem(NamedTuple):
    """The arguments of `msda.backward`, in its order."""

    value: Any
    spatial_shapes: Any
    level_start_index: Any
    sampling_locations: Any
    attention_weights: Any
    grad_output: Any

    @property
    def inputs(self):
        """The arguments of `msda.forward`."""
        return self[:5]


FLOATS = ("value", "sampling_locations", "attention_weights", "grad_output")


def dtype_of(name):
    """Return the dtype of that name; skips the test if it needs a package that is missing."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def results(problem, module=msda, **options):
    """Compute the output and the three gradients, with `msda` or with `msda.reference`."""
    output = module.forward(*problem.inputs, **options)
    gradients = module.backward(*problem, **options)
    return {"output": output} | {f"grad_{name}": array for name, array in gradients._asdict().items()}


def bits(array):
    """Return an array's elements as unsigned integers, of which one stands for every NaN."""
    unsigned = f"u{array.itemsize}"
    native = np.asarray(array).view(array.dtype.str[0] + unsigned).astype(unsigned)
    infinity = np.array(np.inf, array.dtype.newbyteorder("=")).view(unsigned)
    magnitude = native & np.array(2 ** (8 * array.itemsize - 1) - 1, unsigned)
    return np.where(magnitude > infinity, np.array(-1).astype(unsigned), native)


def difference(actual, expected):
    """Return in words how two arrays differ in dtype (but for its byte order), shape or bits; "" if in nothing."""
    if actual.dtype.newbyteorder("=") != expected.dtype.newbyteorder("="):
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    differ = bits(actual) != bits(expected)
    if not differ.any():
        return ""
    first = tuple(np.argwhere(differ)[0].tolist())
    return (
        f"{differ.sum()} of {differ.size} differ; at {first}: {actual[first]!r}, expected {expected[first]!r}"
    )


def assert_same(actual, expected, context=""):
    """Assert that two arrays, or two dicts of arrays, are the same to the last bit; a NaN equals a NaN."""
    if not isinstance(expected, dict):
        actual, expected = {"result": actual}, {"result": expected}
    assert actual.keys() == expected.keys()
    differences = {name: difference(actual[name], expected[name]) for name in expected}
    assert not any(differences.values()), f"{context}: {differences}"


def assert_team(plan, num_threads):
    """Assert that the last call was planned for that many threads and that so many ran."""
    if not threads._system.openmp():
        num_threads = 1
    assert (plan.threads, threads.last_team()) == (num_threads, num_threads)


def is_plus_zero(array):
    """Tell for each element whether it is +0."""
    return bits(array) == 0


def python(code, *arguments, timeout=120, **environment):
    """Run code in a new process that finds the modules of the tests; return what it prints."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Random problems


def random_levels(rng, max_levels=4, max_side=9):
    """Return random maps that may leave gaps, overlap and come in any order: shapes, starts, num_keys."""
    shapes = rng.integers(0, max_side + 1, (rng.integers(1, max_levels + 1), 2))
    sizes = shapes.prod(axis=1)
    if rng.random() < 0.3:
        return shapes, None, int(sizes.sum())
    num_keys = int(sizes.max() + rng.integers(0, sizes.sum() + 2))
    return shapes, rng.integers(0, num_keys - sizes + 1), num_keys


def random_locations(rng, shape, shapes):
    """Return locations inside and outside the maps, on centres and borders of pixels, and no numbers at all."""
    locations = rng.uniform(-0.3, 1.3, shape)
    size = np.maximum(np.asarray(shapes).reshape(-1, 2)[:, np.newaxis, ::-1], 1)
    halves = np.floor(locations * 2 * size) / 2 / size
    kind = rng.random(shape)
    locations = np.where(kind < 0.2, halves, locations)
    for k, odd in enumerate((np.nan, np.inf, -np.inf, 1e30, -1e30)):
        locations[(kind > 0.99 - 0.01 * k) & (kind < 1 - 0.01 * k)] = odd
    return locations


def random_problem(
    rng,
    shapes=((3, 5), (4, 2)),
    starts=None,
    num_keys=None,
    *,
    bs=1,
    heads=1,
    channels=4,
    queries=5,
    points=2,
    dtypes=("float32",) * 4,
):
    """Return a problem of finite numbers (locations excepted) of these dtypes, in the order of `FLOATS`."""
    dtypes = (dtypes,) * 4 if isinstance(dtypes, str) else dtypes
    value_dtype, locations_dtype, weights_dtype, grad_output_dtype = map(dtype_of, dtypes)
    shapes = np.asarray(shapes, np.int64).reshape(-1, 2)
    if num_keys is None:
        num_keys = int(shapes.prod(axis=1).sum())
    samples = (bs, queries, heads, len(shapes), points)
    with np.errstate(over="ignore"):  # locations that float16 has no number for
        locations = random_locations(rng, (*samples, 2), shapes).astype(locations_dtype)
    return Problem(
        rng.standard_normal((bs, num_keys, heads, channels)).astype(value_dtype),
        shapes,
        starts,
        locations,
        rng.uniform(-0.5, 1, samples).astype(weights_dtype),
        rng.standard_normal((bs, queries, heads * channels)).astype(grad_output_dtype),
    )
