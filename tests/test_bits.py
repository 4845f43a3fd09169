"""The same bits: whatever the threads, the rest of the batch, the memory, the instruction set, the processor's mode."""

import ctypes
import hashlib
import itertools
import platform
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import msda
from compare import (
    DTYPES,
    FLOATS,
    Problem,
    assert_same,
    assert_team,
    bits,
    difference,
    python,
    random_problem,
    results,
)
from msda import _kernels, plan, reference, threads

TEAMS = (1, 2, 3, 7, 16, 64)
LEVELS = (((6, 9), (5, 4), (3, 3)), (9, 70, 0), 91)  # out of order, with a gap

packed_or_not = pytest.mark.parametrize("touches", [0, np.inf], ids=["packed", "in place"])


# ---- threads --------------------------------------------------------------------------------------------


def differing(compute):
    """Return for which teams `compute(num_threads)` gives other bits than for one thread, in any of three runs."""
    expected = compute(1)
    return [
        n
        for n in TEAMS
        if any(difference(array, expected[name]) for _ in range(3) for name, array in compute(n).items())
    ]


@pytest.fixture
def many_blocks(monkeypatch):
    """Problems of 15 blocks of queries, in each dtype, so that there are work items for every team."""
    monkeypatch.setattr(reference, "QUERY_BLOCK", 9)
    return lambda dtype: random_problem(
        np.random.default_rng(0), *LEVELS, bs=2, heads=4, channels=43, queries=135, dtypes=dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads(dtype, many_blocks, plans):
    problem = many_blocks(dtype)

    def compute(num_threads):
        output = msda.forward(*problem.inputs, num_threads=num_threads)
        assert_team(plans[-1], num_threads)
        gradients = msda.backward(*problem, num_threads=num_threads)
        assert_team(plans[-1], num_threads)
        dots = msda.backward(
            *problem, wrt=("sampling_locations", "attention_weights"), num_threads=num_threads
        )
        assert_team(plans[-1], num_threads)
        return {"output": output, **gradients._asdict(), "dots x": dots[1], "dots": dots[2]}

    assert differing(compute) == []
    assert_same(results(problem, num_threads=7), results(problem, reference))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_depends_on_the_number_of_threads_is_caught(dtype, many_blocks):
    """What the test above would see if each thread took a share of the queries, and their sums were added."""
    problem = many_blocks(dtype)

    def compute(num_threads):
        edges = [i * 135 // num_threads for i in range(num_threads + 1)]
        shares = [
            msda.backward(
                *problem[:3],
                *(array[:, begin:end] for array in problem[3:]),
                wrt="value",
                num_threads=num_threads,
            ).value
            for begin, end in itertools.pairwise(edges)
        ]
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        return {"grad_value": total}

    assert differing(compute) == [n for n in TEAMS if n > 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_number_of_threads(dtype, many_blocks, plans, monkeypatch):
    problem = many_blocks(dtype)
    expected = results(problem, num_threads=1)
    default = msda.get_num_threads()
    for _ in range(3):
        assert_same(results(problem), expected)
        assert_team(plans[-1], min(default, plans[-1].items))
    for chosen in (1, 3, 16):
        monkeypatch.setattr(threads, "_set_by_user", chosen)
        assert_same(results(problem), expected)
        assert_team(plans[-1], chosen)


def test_blocks_of_the_real_size(plans):
    queries = 8 * reference.QUERY_BLOCK + 1
    problem = random_problem(np.random.default_rng(1), ((6, 9),), bs=4, heads=2, queries=queries, points=1)
    expected = results(problem, num_threads=1)
    for num_threads in TEAMS[1:]:
        assert_same(results(problem, num_threads=num_threads), expected)
        assert plans[-1].chunks == 9
        assert_team(plans[-1], num_threads)


@packed_or_not
@pytest.mark.parametrize("part_cost", [0.1, 1e9])
def test_few_blocks_and_many_threads(part_cost, touches, plans, monkeypatch):
    """However the work is cut for a team, levels apart or not."""
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    monkeypatch.setattr(plan, "PART_COST", part_cost)
    problem = random_problem(np.random.default_rng(2), *LEVELS, channels=21, queries=60)
    expected = results(problem, reference)
    for num_threads in TEAMS:
        for _ in range(3):
            assert_same(results(problem, num_threads=num_threads), expected)
    assert plans[-1].parts.count == (3 if part_cost < 1 and threads._system.openmp() else 1)


# ---- batch elements and heads ---------------------------------------------------------------------------


def part_of(problem, bs=slice(None), heads=slice(None)):
    """Cut a problem down to some batch elements and heads."""
    channels = problem.value.shape[3]
    first, last, _ = heads.indices(problem.value.shape[2])
    return Problem(
        problem.value[bs, :, heads],
        problem.spatial_shapes,
        problem.level_start_index,
        problem.sampling_locations[bs, :, heads],
        problem.attention_weights[bs, :, heads],
        problem.grad_output[bs, :, first * channels : last * channels],
    )


def part_of_results(computed, channels, bs=slice(None), heads=slice(None)):
    first, last, _ = heads.indices(computed["grad_value"].shape[2])
    return {
        name: array[bs, :, first * channels : last * channels] if name == "output" else array[bs, :, heads]
        for name, array in computed.items()
    }


ONE_OF = [{axis: slice(k, k + 1)} for axis, n in (("bs", 5), ("heads", 3)) for k in range(n)]


@packed_or_not
@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_and_together(dtype, touches, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    monkeypatch.setattr(reference, "QUERY_BLOCK", 7)
    problem = random_problem(
        np.random.default_rng(3), *LEVELS, bs=5, heads=3, channels=21, queries=20, dtypes=dtype
    )
    for num_threads in (1, 3):
        together = results(problem, num_threads=num_threads)
        for some in [
            *ONE_OF,
            {"bs": slice(1, 4)},
            {"heads": slice(1, 3)},
            {"bs": slice(2, 5), "heads": slice(2)},
        ]:
            alone = results(part_of(problem, **some), num_threads=num_threads)
            assert_same(alone, part_of_results(together, 21, **some), some)


@packed_or_not
@pytest.mark.parametrize("one", ONE_OF, ids=str)
def test_a_needle_among_others(one, touches, monkeypatch):
    """Nothing in the other batch elements, or in the other heads, makes a difference: no NaN, nothing huge."""
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    rng = np.random.default_rng(4)
    problem = random_problem(rng, *LEVELS, bs=5, heads=3, channels=21, queries=20)
    expected = part_of_results(results(problem), 21, **one)
    for other in (np.nan, np.inf, 0, 3e38, 1e-45, None):
        changed = problem._replace(**{name: getattr(problem, name).copy() for name in FLOATS})
        for name in FLOATS:
            array = getattr(changed, name)
            array[...] = rng.random(array.shape) if other is None else other
            needle = getattr(part_of(problem, **one), name)
            getattr(part_of(changed, **one), name)[...] = needle
        for num_threads in (1, 3):
            assert_same(
                part_of_results(results(changed, num_threads=num_threads), 21, **one), expected, other
            )


# ---- memory ---------------------------------------------------------------------------------------------


def shifted(array, shift):
    """Copy an array to an address that is `shift` bytes past a multiple of 64."""
    buffer = np.empty(array.nbytes + 128, np.uint8)
    begin = -buffer.ctypes.data % 64 + shift
    copy = np.ndarray(array.shape, array.dtype, buffer, begin)
    copy[...] = array
    assert copy.ctypes.data % 64 == shift
    return copy


@packed_or_not
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(dtype, touches, monkeypatch):
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = random_problem(np.random.default_rng(5), *LEVELS, heads=2, channels=35, queries=9, dtypes=dtype)
    expected = results(problem)
    for shift in range(64):
        # Each array has a shift of its own, and in the course of the test all of them.
        moved = problem._replace(
            **{
                name: shifted(getattr(problem, name), (k * shift + 5 * k) % 64)
                for k, name in enumerate(FLOATS, 1)
            }
        )
        output, *gradients = (
            shifted(array, (shift + 3 * k) % 64) for k, array in enumerate(expected.values())
        )
        msda.forward(*moved.inputs, out=output)
        msda.backward(*moved, out=tuple(gradients))
        assert_same(dict(zip(expected, (output, *gradients), strict=True)), expected, shift)
    for name in FLOATS:
        for shift in range(64):
            moved = problem._replace(**{name: shifted(getattr(problem, name), shift)})
            assert_same(results(moved), expected, (name, shift))


@packed_or_not
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(dtype, touches, monkeypatch):
    """Rows of value that lie apart by more than their length, or backwards; every axis in every place."""
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", touches)
    problem = random_problem(
        np.random.default_rng(6), *LEVELS, bs=2, heads=2, channels=35, queries=9, dtypes=dtype
    )
    expected = results(problem)
    for order in itertools.permutations(range(4)):
        back = np.argsort(order)
        for step in (1, -1, 2):
            moved = problem.value.transpose(order).repeat(abs(step), axis=0)[:: abs(step)]
            if step < 0:
                moved = moved[::-1].copy()[::-1]
            given = problem._replace(value=moved.transpose(back))
            assert_same(results(given, num_threads=2), expected, (order, step))


# ---- instruction sets -----------------------------------------------------------------------------------


def digest_of_many():
    """Return one digest of many problems, whose numbers are the same in each process here; changes the plans."""
    rng = np.random.default_rng(7)
    sha256 = hashlib.sha256()
    for channels in itertools.chain(range(1, 80), (127, 128, 129, 255, 300)):
        for dtype in ("float32", "float64", "float16"):
            problem = random_problem(rng, *LEVELS, heads=2, channels=channels, queries=7, dtypes=dtype)
            for touches in (0, np.inf):
                plan.TOUCHES_TO_PACK = touches
                for array in results(problem, num_threads=2).values():
                    sha256.update(bits(array).tobytes())
    return sha256.hexdigest()


def test_every_instruction_set():
    runnable = [isa for isa in _kernels.built_isas() if isa in _kernels._system.supported_isas()]
    assert "baseline" in runnable and _kernels.isa in runnable
    code = "import test_bits; print(test_bits.msda.runtime_info()['isa'], test_bits.digest_of_many())"
    printed = [python(code, MSDA_ISA=isa).split() for isa in runnable]
    assert [isa for isa, _ in printed] == runnable
    assert len({digest for _, digest in printed}) == 1


# ---- the processor's mode -------------------------------------------------------------------------------


class Mode:
    """The calling thread's floating-point mode: rounding direction, and whether subnormal numbers are kept."""

    # Where the C library's fenv_t holds the control bits, those bits, and the values that switch on what is asked.
    _layouts = {  # noqa: RUF012
        "x86_64": (28, 0xFFC0, {"flush to zero": 0x8040, "round upward": 0x4000}),
        "aarch64": (0, 0xFFFF_FFFF, {"flush to zero": 1 << 24, "round upward": 1 << 22}),
    }

    def __init__(self):
        self._offset, self._mask, self._values = self._layouts[platform.machine()]
        self._libm = ctypes.CDLL("libm.so.6")

    def _environment(self):
        environment = np.zeros(64, np.uint8)
        assert self._libm.fegetenv(ctypes.c_void_p(environment.ctypes.data)) == 0
        return environment, environment[self._offset : self._offset + 4].view(np.uint32)

    def get(self):
        """Return the control bits."""
        return int(self._environment()[1][0]) & self._mask

    def switch_on(self, name):
        environment, word = self._environment()
        word |= np.uint32(self._values[name])
        assert self._libm.fesetenv(ctypes.c_void_p(environment.ctypes.data)) == 0

    def set(self, control):
        environment, word = self._environment()
        word[0] = (int(word[0]) & ~self._mask) | control
        assert self._libm.fesetenv(ctypes.c_void_p(environment.ctypes.data)) == 0

    @staticmethod
    def names_on():
        """Return which modes the arithmetic of the calling thread shows."""
        found = []
        if np.float32(1e-40) * np.float32(1) == 0:
            found.append("flush to zero")
        if np.float32(1) + np.float32(1e-10) > 1:
            found.append("round upward")
        return found


needs_mode = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in Mode._layouts,
    reason="knows the floating-point environment of Linux on x86-64 and aarch64 only",
)


def openmp_runtime():
    """Return the file of the OpenMP runtime that the kernels use."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (runtime,) = {line.split()[-1] for line in lines if "omp.so" in line}
    return runtime


def modes_of_team(num_threads):
    """Return the control bits of each thread of a team of the OpenMP runtime that the kernels use."""
    seen = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def look(_):
        seen.append(Mode().get())

    ctypes.CDLL(openmp_runtime()).GOMP_parallel(look, None, num_threads, 0)
    return seen


def check_mode(name, order):
    """Compute in a mode that somebody else has switched on, `order` (before or after) the first call."""
    mode = Mode()
    usual = mode.get()
    rng = np.random.default_rng(8)
    tiny = np.float32(2.0**-126)
    problem = random_problem(rng, *LEVELS, bs=12, channels=35, queries=20, points=4)
    problems = [
        problem,
        problem._replace(value=problem.value * tiny),
        problem._replace(grad_output=problem.grad_output * tiny),
        problem._replace(attention_weights=problem.attention_weights * tiny),
        random_problem(rng, *LEVELS, bs=12, queries=20, dtypes=("float16", "float64", "float16", "float64")),
    ]
    expected = [results(each, reference) for each in problems]

    def compute():
        alone = [results(each, num_threads=1) for each in problems]
        computed = [results(each, num_threads=3) for each in problems]
        assert threads.last_team() == (3 if threads._system.openmp() else 1)
        return alone + computed

    runs = [compute()] if order == "after" else []
    mode.switch_on(name)
    odd = mode.get()
    assert odd != usual and mode.names_on() == [name]
    runs.append(compute())
    assert mode.get() == odd and mode.names_on() == [name]  # the caller's mode is the caller's
    mode.set(usual)
    assert mode.names_on() == []
    if threads._system.openmp():
        # Threads of GNU's runtime that were born in the mode keep it; LLVM's give theirs the caller's mode each time.
        keep = order == "before" and "libgomp" in openmp_runtime()
        assert sorted(modes_of_team(3)) == sorted([usual, *[odd if keep else usual] * 2])
    runs.append(compute())
    assert mode.get() == usual
    for computed in runs:
        for k, (each, right) in enumerate(zip(computed, expected * 2, strict=True)):
            assert_same(each, right, k)


def check_handler(num_threads):
    """Let a signal handler switch on a mode in the midst of a call, whose caller is in another one."""
    mode = Mode()
    usual = mode.get()
    rng = np.random.default_rng(9)
    queries = 300_000
    value = rng.standard_normal((1, 400, 2, 32)).astype(np.float32)
    location = np.broadcast_to(rng.random((1, 1, 2, 1, 8, 2), np.float32), (1, queries, 2, 1, 8, 2))
    weights = np.broadcast_to(rng.random((1, 1, 2, 1, 8), np.float32), (1, queries, 2, 1, 8))
    # Sums of numbers of which most are subnormal.
    grad_output = rng.standard_normal((1, 1, 64)).astype(np.float32) * np.float32(2.0**-130)
    grad_output = np.broadcast_to(grad_output, (1, queries, 64))

    def compute():
        gradient = msda.backward(
            value, [(20, 20)], None, location, weights, grad_output, wrt="value", num_threads=int(num_threads)
        )
        ended.append(time.monotonic())
        return gradient.value.tobytes()

    seen, ended = [], []

    def handler(*_):
        seen.append((time.monotonic(), mode.get()))
        mode.switch_on("flush to zero")

    signal.signal(signal.SIGALRM, handler)
    expected = compute()
    mode.switch_on("round upward")
    upward = mode.get()
    begin = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    found = compute()
    after = mode.get()
    mode.set(usual)
    ((when, in_handler),) = seen
    assert begin + 0.01 <= when < ended[-1] - 0.002, "not in the midst of the call"
    assert in_handler == upward
    assert after not in (usual, upward)
    assert found == expected


@needs_mode
@pytest.mark.parametrize("num_threads", [1, 2])
def test_modes_that_a_signal_handler_switches_on(num_threads):
    python("import sys, test_bits; test_bits.check_handler(*sys.argv[1:])", str(num_threads))


@needs_mode
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["flush to zero", "round upward"])
def test_modes_that_others_switch_on(name, order):
    python("import sys, test_bits; test_bits.check_mode(*sys.argv[1:])", name, order)
