"""The kernels against the definition, by bytes; and both against mathematics."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import cases
import msda
from compare import (
    DTYPES,
    Problem,
    assert_same,
    assert_team,
    dtype_of,
    is_plus_zero,
    random_levels,
    random_problem,
    results,
)
from hostile import gaps_intact, hostile_out
from msda import _kernels, api, arguments, plan, reference, threads
from msda.cli import workloads

REALS = ("float32", "float64")
TEAMS = (1, 2, 3, 7)


def assert_defined(problem, context="", **options):
    """Assert that the kernels give the bits of the reference, and return them."""
    computed = results(problem, **options)
    assert_same(computed, results(problem, reference), context)
    return computed


# ---- random shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", TEAMS)
@pytest.mark.parametrize("dtype", REALS)
def test_random_shapes(dtype, num_threads, plans, monkeypatch):
    rng = np.random.default_rng(TEAMS.index(num_threads))
    teams = set()
    for _ in range(80):
        monkeypatch.setattr(reference, "QUERY_BLOCK", int(rng.choice([3, 7, 16384])))
        sizes = {
            "bs": int(rng.integers(1, 4)),
            "heads": int(rng.integers(1, 4)),
            "channels": int(rng.integers(1, 301) if rng.random() < 0.3 else rng.integers(1, 40)),
            "queries": int(rng.integers(1, 30)),
            "points": int(rng.integers(1, 6)),
        }
        problem = random_problem(rng, *random_levels(rng), **sizes, dtypes=dtype)
        assert_defined(problem, sizes, num_threads=num_threads)
        assert_team(plans[-1], min(num_threads, plans[-1].items))
        teams.add(plans[-1].threads)
    assert num_threads in teams or not threads._system.openmp()


@pytest.mark.parametrize("touches", [0, np.inf], ids=["packed", "in place"])
@pytest.mark.parametrize("dtype", REALS)
def test_every_number_of_channels(dtype, touches, plans, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    rng = np.random.default_rng(1)
    for channels in range(1, 301):
        problem = random_problem(rng, heads=2, channels=channels, queries=3, dtypes=dtype)
        assert_defined(problem, channels, num_threads=1 + channels % 3)
        assert plans[-1].packed == (touches == 0)


@pytest.mark.parametrize("channels", [30, 64, 71, 1025, 2048, 3096])
@pytest.mark.parametrize("dtype", REALS)
def test_channels_that_others_fail_on(dtype, channels):
    assert_defined(random_problem(np.random.default_rng(2), channels=channels, queries=9, dtypes=dtype))


@pytest.mark.parametrize("levels, points", [(1, 1), (1, 300), (33, 17), (1, 5), (3, 100)])
def test_any_number_of_levels_and_points(levels, points):
    rng = np.random.default_rng(3)
    shapes = rng.integers(1, 6, (levels, 2))
    assert_defined(random_problem(rng, shapes, channels=3, queries=4, heads=2, points=points), num_threads=2)


MAPS = {
    "one pixel": ((1, 1),),
    "one row": ((1, 9),),
    "one column": ((9, 1),),
    "no rows": ((0, 5),),
    "no columns": ((5, 0),),
    "no pixels among others": ((2, 3), (0, 4), (1, 1), (3, 0), (0, 0), (1, 2)),
    "no levels": (),
}


@pytest.mark.parametrize("num_threads", TEAMS)
@pytest.mark.parametrize("spare", [0, 4], ids=["packed", "keys of no level"])
@pytest.mark.parametrize("name", MAPS)
def test_odd_maps(name, spare, num_threads):
    shapes = np.array(MAPS[name], np.int64).reshape(-1, 2)
    sizes = shapes.prod(axis=1)
    starts = None if spare == 0 else spare // 2 + np.cumsum(sizes) - sizes
    for dtype in REALS:
        problem = random_problem(
            np.random.default_rng(4), shapes, starts, sizes.sum() + spare, heads=2, queries=30, dtypes=dtype
        )
        assert_defined(problem, num_threads=num_threads)


@pytest.mark.parametrize("num_threads", TEAMS)
@pytest.mark.parametrize("starts", [None, (0, 15)])
@pytest.mark.parametrize("empty", ["bs", "heads", "channels", "queries", "points"])
def test_nothing_along_an_axis(empty, starts, num_threads):
    sizes = {"bs": 2, "heads": 3, "channels": 5, "queries": 4, "points": 2} | {empty: 0}
    for dtype in REALS:
        problem = random_problem(np.random.default_rng(5), starts=starts, **sizes, dtypes=dtype)
        for name, array in assert_defined(problem, num_threads=num_threads).items():
            assert (array == 0).all(), name


@pytest.mark.parametrize("touches", [0, np.inf], ids=["packed", "in place"])
@pytest.mark.parametrize("queries, points", [(0, 0), (0, 2), (5, 0), (5, 1), (300, 2)])
@pytest.mark.parametrize("levels", [1, 8, 9, 40, 700])
def test_scratch_memory_is_as_large_as_it_says(
    levels, queries, points, touches, plans, used_memory, monkeypatch
):
    """Nothing is written beyond it; and what it holds at first has no say, nor what results hold."""
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    shapes = [(2, 3), (1, 1), (0, 2), (5, 1), (3, 3)] * (levels // 5) + [(4, 1)] * (levels % 5)
    for channels, dtype, num_threads in ((5, "float16", 1), (32, "float32", 2), (3, "float64", 2)):
        problem = random_problem(
            np.random.default_rng(21), shapes, channels=channels, queries=queries, points=points, dtypes=dtype
        )
        assert_defined(problem, num_threads=num_threads)
    assert plans[0].packed  # always: its numbers are to be widened
    assert len(used_memory) >= 3 * 2  # scratch memory of each call
    for memory, size in used_memory:
        assert (memory[size:] == 0x3F).all()


def test_nothing_anywhere():
    problem = random_problem(np.random.default_rng(6), (), bs=0, heads=0, channels=0, queries=0, points=0)
    assert all(array.size == 0 for array in assert_defined(problem).values())


# ---- how calls are cut ----------------------------------------------------------------------------------

# Three disjoint levels, of which the second one listed lies first; and three of which two overlap.
APART = (((3, 5), (2, 4), (4, 4)), (12, 0, 30), 50)
OVERLAPPING = (((3, 5), (2, 4), (4, 4)), (3, 30, 10), 40)

# levels, threads, PART_COST, queries -> parts, whether blocks are apart
BACKWARD_PLANS = {
    "one part, one block": (APART, 1, 1.6, 8, 1, False),
    "one part, blocks one after the other": (APART, 1, 1.6, 45, 1, False),
    "one part, blocks apart": (APART, 3, 1e9, 45, 1, True),
    "blocks apart, in several rounds": (APART, 3, 1e9, 70, 1, True),
    "parts, one block": (APART, 3, 0.1, 8, 3, False),
    "parts, blocks one after the other": (APART, 3, 0.1, 16, 3, False),
    "parts and blocks apart": (APART, 7, 0.1, 45, 3, True),
    "overlapping levels stay together": (OVERLAPPING, 7, 0.1, 45, 2, True),
}


@pytest.mark.skipif(not threads._system.openmp(), reason="one thread has one plan")
@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("touches", [0, np.inf], ids=["packed", "in place"])
@pytest.mark.parametrize("name", BACKWARD_PLANS)
def test_backward_plans(name, touches, dtype, plans, monkeypatch):
    levels, num_threads, part_cost, queries, parts, apart = BACKWARD_PLANS[name]
    monkeypatch.setattr(reference, "QUERY_BLOCK", 10)
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    monkeypatch.setattr(plan, "PART_COST", part_cost)
    rng = np.random.default_rng(7)
    problem = random_problem(rng, *levels, heads=1, channels=19, queries=queries, dtypes=dtype)
    expected = reference.backward(*problem)
    for out in (None, tuple(np.full_like(array, np.nan) for array in expected)):
        gradients = msda.backward(*problem, num_threads=num_threads, out=out)
        assert_same(gradients._asdict(), expected._asdict(), f"out given: {out is not None}")
        chosen = plans[-1]
        blocks = -(-queries // 10)
        assert chosen.chunks == blocks
        assert (chosen.parts.count, chosen.chunks_apart) == (parts, apart)
        # One private sum for each block cannot be the caller's array.
        assert chosen.packed == (touches == 0 or blocks > 1)
        assert chosen.clear_grad_value == (out is not None)
        assert_team(chosen, num_threads)


def test_one_image_has_work_for_64_threads():
    """The encoder's backward pass: as many items as threads, with equally many samples in each."""
    workload = workloads.ALL["encoder"]
    keys, heads, channels = workload.num_keys, workload.num_heads, workload.channels
    points = workload.num_points
    samples = (1, keys, heads, len(workload.spatial_shapes), points)
    value, locations, weights, grad_output = (
        np.broadcast_to(np.float32(0), shape)
        for shape in ((1, keys, heads, channels), (*samples, 2), samples, (1, keys, heads * channels))
    )
    inputs = arguments.backward_inputs(
        value, workload.spatial_shapes, None, locations, weights, grad_output, "xy"
    )
    chosen = plan.backward(inputs, 64, None)
    assert chosen.items == chosen.threads == 64 and chosen.chunks_apart
    blocks = [end - begin for begin, end in reference.query_blocks(keys)]
    assert len(blocks) == chosen.chunks
    work = [heads * [levels * points * queries] for levels in chosen.parts.level_counts for queries in blocks]
    assert sum(map(len, work)) == 64
    assert sum(map(sum, work)) == np.prod(samples)
    assert max(map(max, work)) < 1.001 * min(map(min, work))


# levels, starts, how many levels each part has
LARGE_LEVELS = {
    "the first": ([(30, 30), (9, 9), (5, 5)], None, [1, 2]),
    "the last": ([(5, 5), (9, 9), (30, 30)], None, [2, 1]),
    "in the middle": ([(5, 5), (30, 30), (9, 9)], None, [1, 1, 1]),
    "two": ([(30, 30), (40, 30), (9, 9), (5, 5)], None, [1, 1, 2]),
    "all": ([(30, 30), (40, 30)], None, [1, 1]),
    "none": ([(9, 9), (5, 5)], None, [2]),
    "alone": ([(30, 30)], None, [1]),
    "two that overlap": ([(30, 30), (9, 9), (30, 30), (5, 5)], [0, 1300, 400, 1400], [2, 2]),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", LARGE_LEVELS)
def test_large_levels_are_apart(name, num_threads, plans, monkeypatch):
    levels, starts, level_counts = LARGE_LEVELS[name]
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", 0)
    keys = 1500 if starts else None
    problem = random_problem(
        np.random.default_rng(22), levels, starts, keys, heads=2, channels=19, queries=40
    )
    assert_defined(problem, num_threads=num_threads)
    assert plans[-1].parts.count == 1
    monkeypatch.setattr(plan, "LARGE_LEVEL", 30 * 30 * 2 * 19 * 4)
    monkeypatch.setattr(plan, "MUCH_WORK", len(levels) * 2 * 19 * 4)
    assert_defined(problem, num_threads=num_threads)
    assert plans[-1].parts.level_counts == level_counts
    monkeypatch.setattr(plan, "MUCH_WORK", len(levels) * 2 * 19 * 4 + 1)
    assert_defined(problem, num_threads=num_threads)
    assert plans[-1].parts.count == 1
    monkeypatch.setattr(plan, "MUCH_WORK", 0)
    # Where there are few touches, rows stay in the caller's arrays, and levels together.
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", np.inf)
    assert_defined(problem, num_threads=num_threads)
    assert plans[-1].parts.count == 1
    # But not the sums of several blocks.
    monkeypatch.setattr(reference, "QUERY_BLOCK", 16)
    assert_defined(problem, num_threads=num_threads)
    assert plans[-1].parts.level_counts == level_counts and plans[-1].packed


def test_rows_of_no_level_make_no_level_large(plans, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", 0)
    monkeypatch.setattr(plan, "LARGE_LEVEL", 500 * 2 * 19 * 4)
    monkeypatch.setattr(plan, "MUCH_WORK", 0)
    problem = random_problem(
        np.random.default_rng(22), [(9, 9), (5, 5)], [0, 900], 1500, channels=19, queries=40
    )
    assert_defined(problem)
    assert plans[-1].parts.count == 1


@pytest.mark.parametrize("wrt", [None, ("sampling_locations", "attention_weights")], ids=["forward", "dots"])
@pytest.mark.parametrize("touches", [0, np.inf], ids=["packed", "in place"])
@pytest.mark.parametrize("num_threads", TEAMS)
def test_plans_without_a_gradient_of_value(num_threads, touches, wrt, plans, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    for units, queries in ((1, 29), (3, 29), (1, 3), (8, 1)):
        problem = random_problem(np.random.default_rng(8), bs=units, channels=19, queries=queries)
        if wrt is None:
            assert_same(
                msda.forward(*problem.inputs, num_threads=num_threads), reference.forward(*problem[:5])
            )
        else:
            gradients = msda.backward(*problem, wrt=wrt, num_threads=num_threads)
            expected = reference.backward(*problem, wrt=wrt)
            assert gradients.value is None
            assert_same(dict(enumerate(gradients[1:])), dict(enumerate(expected[1:])))
        assert plans[-1].packed == (touches == 0)
        assert_team(plans[-1], min(num_threads, units * queries))


def test_what_cannot_be_touched_in_place_is_packed(plans, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", np.inf)
    problem = random_problem(np.random.default_rng(9), channels=19)
    value = problem.value
    swapped = value.astype(value.dtype.newbyteorder("S"))
    strided = np.repeat(value, 2, axis=3)[..., ::2]
    for other in (value.astype(np.float16), swapped, strided, value.swapaxes(1, 3).copy().swapaxes(1, 3)):
        assert_defined(problem._replace(value=other))
        assert [each.packed for each in plans[-2:]] == [True, True]
    out = (np.empty(value.shape, np.float64), None, None)
    assert_same(msda.backward(*problem, out=out).value.astype(np.float32), reference.backward(*problem).value)
    assert plans[-1].packed
    assert_defined(problem)
    assert not plans[-1].packed


@pytest.mark.parametrize("num_threads", TEAMS)
@pytest.mark.parametrize("dtype", REALS)
def test_small_blocks(dtype, num_threads, plans, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_BLOCK", 4)
    rng = np.random.default_rng(10)
    for queries in range(1, 40):
        problem = random_problem(rng, channels=3, queries=queries, dtypes=dtype)
        assert_defined(problem, queries, num_threads=num_threads)
        assert plans[-1].chunks == -(-queries // 4)
        assert_team(plans[-1], min(num_threads, plans[-1].items))


@pytest.mark.parametrize("num_threads", TEAMS)
def test_blocks_of_the_real_size(num_threads, plans):
    queries = 2 * reference.QUERY_BLOCK + 1
    # bs * heads * blocks, so that there is an item for each of seven threads.
    problem = random_problem(np.random.default_rng(11), channels=2, queries=queries, points=1, bs=3)
    assert_defined(problem, num_threads=num_threads)
    assert plans[-1].chunks == 3
    assert_team(plans[-1], num_threads)


# Where on the maps each block of queries samples: some places are left and come to again.
WALKS = {
    "ahead": (0.1, 0.3, 0.5, 0.7, 0.9),
    "to and fro": (0.1, 0.9, 0.1, 0.5, 0.9, 0.1),
    "far apart": (0.02, 0.98, 0.5),
    "in one place": (0.4, 0.4, 0.4, 0.4),
    "nowhere in between": (0.2, 7.0, 0.2, 7.0, 0.8),
}


@pytest.mark.parametrize("num_threads", TEAMS)
@pytest.mark.parametrize("walk", WALKS)
def test_blocks_that_touch_few_rows_of_many(walk, num_threads, plans, monkeypatch):
    size, blocks = 100, len(WALKS[walk])  # several tiles
    monkeypatch.setattr(reference, "QUERY_BLOCK", size)
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", 0)
    rng = np.random.default_rng(14)
    # The levels begin and end within groups of rows; two of them overlap.
    shapes, starts = [(40, 33), (7, 11), (30, 20)], [650, 0, 0]
    for channels, heads, dtype in ((3, 3, "float32"), (20, 1, "float32"), (5, 2, "float64")):
        problem = random_problem(
            rng, shapes, starts, 2000, channels=channels, heads=heads, queries=size * blocks, dtypes=dtype
        )
        # Within a block up the map, or down.
        steps = np.linspace(-0.15, 0.15, size) * rng.choice([-1, 1], (blocks, 1))
        rows = (np.array(WALKS[walk])[:, None] + steps).reshape(1, -1, 1, 1, 1)
        noise = rng.uniform(-0.03, 0.03, problem.attention_weights.shape)
        problem.sampling_locations[..., 1] = rows + noise
        problem.sampling_locations[..., 0] = rng.uniform(-0.1, 1.1, noise.shape)
        # So far apart in size that each order of a sum has a result of its own.
        problem.grad_output[...] *= 2.0 ** rng.integers(-12, 12, (1, size * blocks, 1))
        expected = assert_defined(problem, (channels, heads, dtype), num_threads=num_threads)
        assert plans[-1].chunks == blocks
        for wrt in (("sampling_locations", "attention_weights"), ("value",), ("value", "attention_weights")):
            gradients = msda.backward(*problem, wrt=wrt, num_threads=num_threads)
            for name in wrt:
                assert_same(getattr(gradients, name), expected["grad_" + name], wrt)
        assert all(each.packed for each in plans)


@pytest.mark.parametrize("num_threads", TEAMS)
def test_queries_after_all_rows_have_been_packed(num_threads, plans, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", 0)
    problem = random_problem(
        np.random.default_rng(20), [(20, 17), (7, 11)], channels=20, queries=700, points=4
    )
    wrt = ("sampling_locations", "attention_weights")
    expected = assert_defined(problem, num_threads=num_threads)
    dots = msda.backward(*problem, wrt=wrt, num_threads=num_threads)
    for name in wrt:
        assert_same(getattr(dots, name), expected["grad_" + name])
    assert all(each.packed for each in plans)


# Where on a large map the queries sample, one after the other, as shares of its height.
PATHS = {
    "down": lambda t, rng: t,
    "up": lambda t, rng: 1 - t,
    "twice": lambda t, rng: 2 * t % 1,
    "to and fro": lambda t, rng: 0.5 + 0.25 * np.sin(18 * t),
    "down, with single queries elsewhere": lambda t, rng: np.where(
        rng.random(t.shape) < 0.02, rng.random(t.shape), t
    ),
    "in two places in turn": lambda t, rng: 0.4 * t + 0.6 * (np.arange(len(t)) // 64 % 2),
    "everywhere": lambda t, rng: rng.random(t.shape),
    "jumping": lambda t, rng: np.repeat(rng.random(len(t) // 64), 64),
}


# Maps of which half of the packed rows or less are there at a time: levels, starts, keys, channels, points and
# LARGE_LEVEL. And for each part whether it has a window in a backward pass, and in a forward pass, where rows are half
# as large.
LARGE_MAPS = {
    "narrow": ([(400, 3)], None, 1200, 515, 8, np.inf, [True], [True]),
    "lines longer than a group": ([(130, 65)], None, 8450, 64, 40, np.inf, [True], [True]),
    "after a small one": ([(2, 5), (260, 3)], [800, 20], 810, 515, 8, 1_000_000, [True, False], [False]),
}


def on_a_large_map(name, path, dtype):
    shapes, starts, keys, channels, points, *_ = LARGE_MAPS[name]
    rng = np.random.default_rng(21)
    if dtype == "float64":
        channels = channels // 2 + channels % 2
    problem = random_problem(
        rng, shapes, starts, keys, heads=2, channels=channels, queries=640, points=points, dtypes=dtype
    )
    t = (np.arange(640) + 0.5) / 640
    noise = rng.normal(0, 0.004, problem.attention_weights.shape)
    problem.sampling_locations[..., 1] = PATHS[path](t, rng).reshape(1, -1, 1, 1, 1) + noise
    problem.grad_output[...] *= (2.0 ** rng.integers(-6, 6, (1, 640, 1))).astype(dtype)
    return problem


@pytest.fixture
def windows(monkeypatch):
    """For each call that a test makes, and for each of its parts, whether it has a window."""
    made = []

    def recorded(*args, **kwargs):
        call = _kernels.Call(*args, **kwargs)
        made.append([places > 0 for places in call.windows])
        return call

    monkeypatch.setattr(api, "_kernels", SimpleNamespace(Call=recorded))
    return made


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("narrow", "float32"),
        ("narrow", "float16"),
        ("lines longer than a group", "float32"),
        ("lines longer than a group", "float64"),
        ("lines longer than a group", "float16"),
        ("after a small one", "float32"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_window_on_a_large_map(name, path, dtype, plans, windows, used_memory, monkeypatch):
    """Rows take turns in packed memory, whatever that holds at first."""
    *_, large, in_backward, in_forward = LARGE_MAPS[name]
    monkeypatch.setattr(reference, "QUERY_BLOCK", 320)
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", 0)
    monkeypatch.setattr(plan, "LARGE_LEVEL", large)
    problem = on_a_large_map(name, path, dtype)
    expected = assert_defined(problem, num_threads=1)  # one head after the other, in the same memory
    assert windows == [in_forward, in_backward]
    assert_same(results(problem, num_threads=2), expected)
    assert windows[2:] == [in_forward, in_backward]
    if threads._system.openmp():
        # The output in pieces; blocks that are apart have no windows.
        assert_same(results(problem, num_threads=3), expected)
        assert windows[4] == in_forward and plans[-2].chunks > 1
    for wrt in ("value", "sampling_locations"):
        for num_threads in (1, 2):
            gradients = msda.backward(*problem, wrt=wrt, num_threads=num_threads)
            assert_same(getattr(gradients, wrt), expected["grad_" + wrt], wrt)
    for memory, size in used_memory:
        assert (memory[size:] == 0x3F).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "dtype, out_dtype",
    [("float32", "float32"), ("float64", "float64"), ("float16", "float32"), ("float32", "float16")],
)
def test_sums_that_leave_a_window_wait_in_any_array(dtype, out_dtype, num_threads, windows, monkeypatch):
    """In the caller's, if it can hold them."""
    monkeypatch.setattr(reference, "QUERY_BLOCK", 320)
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", 0)
    problem = on_a_large_map("narrow", "to and fro", dtype)
    wide = problem._replace(value=problem.value.astype(np.result_type(dtype, out_dtype)))
    expected = reference.round_to(reference.backward(*wide).value, np.dtype(out_dtype))
    for label, out in hostile_out(problem.value.shape, out_dtype):
        msda.backward(*problem, wrt="value", out=(out, None, None), num_threads=num_threads)
        assert windows[-1] == [True]
        assert_same(out, expected, label)
        assert gaps_intact(out), label


def test_the_number_of_blocks_is_part_of_the_result(monkeypatch):
    """So the tests above would see blocks that are cut in another way."""
    problem = random_problem(np.random.default_rng(12), channels=3, queries=40)
    several = {}
    for size in (40, 20, 10, 7):
        monkeypatch.setattr(reference, "QUERY_BLOCK", size)
        several[size] = assert_defined(problem)["grad_value"].tobytes()
    assert len(set(several.values())) == 4


# ---- dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_output", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("locations", DTYPES)
@pytest.mark.parametrize("value", DTYPES)
def test_any_mix_of_dtypes(value, locations, weights, grad_output):
    dtypes = (value, locations, weights, grad_output)
    rng = np.random.default_rng(13)
    problem = random_problem(rng, heads=2, channels=21, queries=3, dtypes=dtypes)
    computed = assert_defined(problem, num_threads=2)
    assert [array.dtype for array in computed.values()] == [dtype_of(name) for name in (value, *dtypes[:3])]


def every_number(name):
    """All the numbers of a two-byte dtype, infinities and NaNs among them."""
    return np.arange(2**16, dtype=np.uint16).view(dtype_of(name))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_number_of_two_bytes_is_read_and_written(name):
    numbers = every_number(name)
    with np.errstate(invalid="ignore"):
        wide = numbers.astype(np.float32)
    wide[wide == 0] = 0  # a sum that starts from +0 is never -0
    # One pixel for each, and a query at its centre.
    problem = Problem(
        np.ones((1, 1, 1, 2**16), np.float32),
        [(1, 1)],
        None,
        np.full((1, 1, 1, 1, 1, 2), 0.5, np.float32),
        np.ones((1, 1, 1, 1, 1), np.float32),
        numbers.reshape(1, 1, -1),
    )
    for order in "=S":
        for step in (1, 3):
            there = np.repeat(numbers.astype(numbers.dtype.newbyteorder(order)), step)[::step]
            given = problem._replace(grad_output=there.reshape(1, 1, -1))
            grad = msda.backward(*given, wrt="value").value
            assert_same(grad.ravel(), wide, f"read, {order}, {step}")
            out = np.empty((1, 1, 1, step * 2**16), there.dtype)[..., ::step]
            msda.backward(*given, wrt="value", out=(out, None, None))
            expected = np.where(wide == 0, np.zeros(1, numbers.dtype), numbers)
            assert_same(out.ravel(), expected, f"written, {order}, {step}")


@pytest.mark.parametrize("source", REALS)
@pytest.mark.parametrize("name", DTYPES)
def test_results_are_rounded_once(name, source):
    """On numbers beside the middle between two neighbours, where rounding twice goes wrong."""
    target = dtype_of(name)
    rng = np.random.default_rng(14)
    near = rng.standard_normal(3000) * 2.0 ** rng.integers(-26, 16, 3000)
    if target.itemsize == 2:
        infinity = int(np.array(np.inf, target).view(np.uint16))
        steps = every_number(name)[:infinity].astype(np.float64)
        near = np.concatenate([near, (steps[1:] + steps[:-1]) / 2])
    with np.errstate(over="ignore"):
        near = near.astype(source)
    numbers = np.concatenate(
        [near, np.nextafter(near, np.inf, dtype=source), np.nextafter(near, 0, dtype=source)]
    )
    numbers = np.concatenate([numbers, -numbers, np.array([0.0, -0.0, np.inf, -np.inf, np.nan], source)])
    one = np.ones((1, 1, 1, 1, 1), source)
    for step in (1, 2):
        out = np.empty((1, 1, 1, step * numbers.size), target)[..., ::step]
        msda.backward(
            np.ones((1, 1, 1, numbers.size), source),
            [(1, 1)],
            None,
            np.full((1, 1, 1, 1, 1, 2), 0.5, np.float32),
            one,
            numbers.reshape(1, 1, -1),
            wrt="value",
            out=(out, None, None),
        )
        assert_same(out.ravel(), reference.round_to(numbers + 0.0, target))


# ---- known values ---------------------------------------------------------------------------------------


def results_of(case, dtype):
    """Compute a case in a dtype; give the results under the names they have in the file."""
    inputs = [case[key] if case[key].dtype.kind == "i" else case[key].astype(dtype) for key in cases.INPUTS]
    output = msda.forward(*inputs)
    gradients = msda.backward(*inputs, case["grad_output"].astype(dtype))
    return dict(zip(cases.RESULTS, (output, *gradients), strict=True))


def relative_error(actual, expected):
    return np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("name", cases.names())
def test_cases(name, dtype):
    case = cases.load(name)
    for key, result in results_of(case, dtype).items():
        bound = 1e-13 if dtype == "float64" else 2e-7 if key == "grad_value" else 1.5e-7
        assert result.dtype == dtype
        assert result.shape == case[key].shape
        assert relative_error(result, case[key]) <= bound, key
        assert np.array_equal(result == 0, case[key] == 0), key
        assert is_plus_zero(result[case[key] == 0]).all(), key


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_example_of_the_operators_document(dtype):
    computed = results_of(cases.load("document_example"), dtype)
    assert (computed["grad_value"] == 8.0).all()
    assert (computed["grad_sampling_locations"] == 4.0).all()
    assert (computed["grad_attention_weights"] == 2.0).all()


# ---- mathematics ----------------------------------------------------------------------------------------


@pytest.fixture
def smooth():
    """A float64 problem without a sample within 1e-4 pixels of where the function has a kink."""
    rng = np.random.default_rng(15)
    shapes = np.array([(4, 7), (3, 2)])
    problem = random_problem(rng, shapes, bs=2, heads=2, channels=5, queries=6, points=3, dtypes="float64")
    locations = rng.uniform(-0.2, 1.2, problem.sampling_locations.shape)
    sizes = shapes[:, np.newaxis, ::-1]
    positions = locations * sizes - 0.5
    kinks = np.round(positions)
    positions = np.where(np.abs(positions - kinks) < 1e-3, kinks + 2e-3, positions)
    return problem._replace(sampling_locations=(positions + 0.5) / sizes)


def test_finite_differences(smooth):
    gradients = msda.backward(*smooth)
    rng = np.random.default_rng(16)
    for name, gradient in gradients._asdict().items():
        array = getattr(smooth, name)
        for _ in range(20):
            direction = rng.standard_normal(array.shape)
            step = 1e-6 / np.abs(direction).max()
            ahead, behind = (
                np.vdot(
                    msda.forward(*smooth._replace(**{name: array + s * direction}).inputs), smooth.grad_output
                )
                for s in (step, -step)
            )
            slope = np.vdot(gradient, direction)
            assert abs((ahead - behind) / (2 * step) - slope) <= 1e-7 * np.linalg.norm(gradient), name


def test_the_gradient_of_value_is_the_adjoint(smooth):
    output = msda.forward(*smooth.inputs)
    grad_value = msda.backward(*smooth, wrt="value").value
    norm = np.linalg.norm(output) * np.linalg.norm(smooth.grad_output)
    assert abs(np.vdot(output, smooth.grad_output) - np.vdot(smooth.value, grad_value)) <= 1e-14 * norm
    # In value each output is linear, so the gradient does not depend on it.
    assert_same(msda.backward(*smooth._replace(value=smooth.value * 3 - 1), wrt="value").value, grad_value)


def test_outputs_are_linear_in_attention_weights(smooth):
    def output(weights):
        return msda.forward(*smooth._replace(attention_weights=weights).inputs)

    a = smooth.attention_weights
    b = np.random.default_rng(17).standard_normal(a.shape)
    combined = output(2 * a - 3 * b)
    assert np.linalg.norm(combined - (2 * output(a) - 3 * output(b))) <= 1e-14 * np.linalg.norm(combined)
    assert_same(output(a * 4), output(a) * 4)
    assert_same(output(a * 0), output(a) * 0 + 0)
    # The gradient of the weights does not depend on them, and is what one sample alone gives.
    gradients = msda.backward(*smooth)
    other = msda.backward(*smooth._replace(attention_weights=b))
    assert_same(other.attention_weights, gradients.attention_weights)
    assert abs(np.vdot(gradients.attention_weights, a) - np.vdot(output(a), smooth.grad_output)) <= 1e-13


# ---- numbers that are not finite ------------------------------------------------------------------------

INSIDE, OUTSIDE = 0.5, -9.0
ODD = [np.nan, np.inf, -np.inf]


def two_samples(dtype, counting=True, **changes):
    """A 2x2 map and two samples: one touches pixel 0 alone; the other all four or, if it does not count, none."""
    problem = random_problem(
        np.random.default_rng(18), ((2, 2),), channels=3, queries=2, points=1, dtypes=dtype
    )
    problem.sampling_locations[0, 0] = 0.1  # its other corners lie outside
    problem.sampling_locations[0, 1] = INSIDE if counting else OUTSIDE
    for name, (index, number) in changes.items():
        getattr(problem, name)[index] = number
    return problem


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dtype", REALS)
def test_what_does_not_count_adds_nothing(dtype, odd):
    problem = two_samples(
        dtype, False, attention_weights=((0, 1), odd), grad_output=((0, 1), odd), value=((0, 0), odd)
    )
    computed = assert_defined(problem)
    assert is_plus_zero(computed["output"][0, 1]).all()
    assert is_plus_zero(computed["grad_sampling_locations"][0, 1]).all()
    assert is_plus_zero(computed["grad_attention_weights"][0, 1]).all()
    assert np.isfinite(computed["grad_value"]).all()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("location", [*ODD, 1e30, -1e30, -0.25, 1.25])
@pytest.mark.parametrize("dtype", REALS)
def test_locations_that_do_not_count(dtype, location, axis):
    problem = two_samples(dtype, sampling_locations=((0, 1, 0, 0, 0, axis), location))
    computed = assert_defined(problem)
    assert is_plus_zero(computed["output"][0, 1]).all()
    assert is_plus_zero(computed["grad_sampling_locations"][0, 1]).all()
    assert is_plus_zero(computed["grad_attention_weights"][0, 1]).all()
    first = problem._replace(
        sampling_locations=problem.sampling_locations[:, :1],
        attention_weights=problem.attention_weights[:, :1],
        grad_output=problem.grad_output[:, :1],
    )
    for name, array in results(first).items():
        assert_same(computed[name] if name == "grad_value" else computed[name][:, :1], array, name)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dtype", REALS)
def test_value_that_is_touched(dtype, odd):
    computed = assert_defined(two_samples(dtype, value=((0, 3, 0, 1), odd)))
    assert np.isfinite(computed["output"][0]).tolist() == [[True, True, True], [True, False, True]]
    assert np.isfinite(computed["grad_sampling_locations"][0, :, 0, 0, 0]).tolist() == [
        [True] * 2,
        [False] * 2,
    ]
    assert np.isfinite(computed["grad_attention_weights"][0, :, 0, 0, 0]).tolist() == [True, False]
    assert np.isfinite(computed["grad_value"]).all()


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dtype", REALS)
def test_weights_that_are_used(dtype, odd):
    computed = assert_defined(two_samples(dtype, attention_weights=((0, 1), odd)))
    assert np.isfinite(computed["output"][0]).tolist() == [[True] * 3, [False] * 3]
    assert np.isfinite(computed["grad_sampling_locations"][0, :, 0, 0, 0]).tolist() == [
        [True] * 2,
        [False] * 2,
    ]
    assert np.isfinite(computed["grad_attention_weights"]).all()
    assert not np.isfinite(computed["grad_value"]).any()


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dtype", REALS)
def test_grad_output_that_is_used(dtype, odd):
    computed = assert_defined(two_samples(dtype, grad_output=((0, 1, 1), odd)))
    assert np.isfinite(computed["output"]).all()
    assert np.isfinite(computed["grad_sampling_locations"][0, :, 0, 0, 0]).tolist() == [
        [True] * 2,
        [False] * 2,
    ]
    assert np.isfinite(computed["grad_attention_weights"][0, :, 0, 0, 0]).tolist() == [True, False]
    assert np.isfinite(computed["grad_value"][0, :, 0]).tolist() == [[True, False, True]] * 4


@pytest.mark.parametrize("touches", [0, np.inf], ids=["packed", "in place"])
@pytest.mark.parametrize("dtype", REALS)
def test_corners_outside_stay_out_of_it(dtype, touches, monkeypatch):
    """The row that stands in for them receives what is not finite; no later sample may read it."""
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = two_samples(dtype, grad_output=((0, 0), np.nan))
    problem.sampling_locations[...] = 0.1
    problem.attention_weights[0, 0] = np.inf
    computed = assert_defined(problem)
    assert np.isfinite(computed["output"][0, 1]).all()
    assert np.isfinite(computed["grad_sampling_locations"][0, 1]).all()
    assert np.isfinite(computed["grad_value"][0, 1:]).all()


@pytest.mark.parametrize("dtype", REALS)
def test_odd_numbers_everywhere(dtype, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_BLOCK", 4)
    rng = np.random.default_rng(19)
    largest = np.finfo(dtype).max
    for _ in range(60):
        problem = random_problem(
            rng, *random_levels(rng), heads=2, channels=int(rng.integers(1, 40)), dtypes=dtype
        )
        for array in (problem.value, problem.attention_weights, problem.grad_output):
            where = rng.random(array.shape) < 0.02
            array[where] = rng.choice([*ODD, largest, -largest, 0.0, -0.0], where.sum())
        assert_defined(problem, num_threads=2)


@pytest.mark.parametrize("dtype", REALS)
def test_subnormal_numbers(dtype):
    rng = np.random.default_rng(20)
    problem = random_problem(rng, channels=19, queries=20, points=4, dtypes=dtype)
    tiny = np.finfo(dtype).tiny
    problem = problem._replace(value=problem.value * tiny, grad_output=problem.grad_output * tiny)
    for name, array in assert_defined(problem, num_threads=2).items():
        subnormal = (np.abs(array) < tiny) & (array != 0)
        assert subnormal.any() or name in ("grad_sampling_locations", "grad_attention_weights")
    problem = problem._replace(value=rng.standard_normal(problem.value.shape).astype(dtype))
    for name, array in assert_defined(problem, num_threads=2).items():
        assert ((np.abs(array) < tiny) & (array != 0)).any() or name == "output"


def test_positions_beside_pixel_borders():
    """Where locations rounded to float32 would fall into another pixel if positions were rounded too."""
    for width in (3, 7, 100, 167, 1333, 65537):
        edges = (np.arange(0, width + 1) - 0.5 + np.array([[0], [0.5]])) / width
        edges = edges.astype(np.float32).ravel()[:4000]
        x = np.concatenate([np.nextafter(edges, np.float32(s)) for s in (-9, 9)] + [edges])
        problem = Problem(
            np.sin(np.arange(width, dtype=np.float32)).reshape(1, width, 1, 1),
            [(1, width)],
            None,
            np.stack([x, np.full_like(x, 0.5)], axis=-1).reshape(1, -1, 1, 1, 1, 2),
            np.ones((1, len(x), 1, 1, 1), np.float32),
            np.ones((1, len(x), 1), np.float32),
        )
        assert_defined(problem, width)


def test_a_plan_can_be_copied():
    """As tuples can."""
    inputs = arguments.forward_inputs(*random_problem(np.random.default_rng(9)).inputs, "xy")
    chosen = plan.forward(inputs, 1)
    copied = pickle.loads(pickle.dumps(chosen))
    assert copied.parts.level_counts == chosen.parts.level_counts
    output = np.zeros(inputs.shapes.output_by_head, np.float32)
    call = _kernels.Call(
        copied, inputs.value, inputs.sampling_locations, inputs.attention_weights, output=output
    )
    call.run(np.empty(call.scratch_bytes, np.uint8))
    assert output.any()
