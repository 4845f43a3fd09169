"""Tests of memory: what a call needs, what it gives back, and what happens when there is none left.

Tests marked limits_memory limit or measure the memory of a whole process: sanitizers need memory of their own.
"""

import contextlib
import gc
import os
import reprlib
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest

import msda
from compare import python
from msda import _kernels, arguments, plan, reference
from msda.cli import workloads

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc here")

SHAPES = [(13, 17), (5, 9)]
KEYS = 13 * 17 + 5 * 9


def run(code, *arguments, timeout=60):
    """Run code in a new Python process and return what it prints."""
    return python(textwrap.dedent(code), *map(str, arguments), timeout=timeout).strip()


def case(dtype=np.float32, queries=300):
    rng = np.random.default_rng(0)
    value = rng.standard_normal((2, KEYS, 2, 20)).astype(dtype)
    locations = (rng.random((2, queries, 2, 2, 4, 2)) * 1.4 - 0.2).astype(dtype)
    weights = rng.random((2, queries, 2, 2, 4)).astype(dtype)
    grad_output = rng.standard_normal((2, queries, 40)).astype(dtype)
    return (value, SHAPES, None, locations, weights), grad_output


def scratch_bytes(inputs, grad_output, num_threads, wrt=(True, True, True)):
    """Return the scratch memory of a backward pass, or of a forward pass where grad_output is None."""
    value, _, _, locations, weights = inputs
    if grad_output is None:
        checked = arguments.forward_inputs(*inputs, "xy")
        output = np.empty((*locations.shape[:3], value.shape[3]), value.dtype)
        chosen, arrays = plan.forward(checked, num_threads), {"output": output}
    else:
        checked = arguments.backward_inputs(*inputs, grad_output, "xy")
        chosen = plan.backward(checked, num_threads, None)
        arrays = {
            "grad_output": checked.grad_output,
            "grad_value": np.empty_like(value),
            "grad_locations": np.empty_like(locations),
            "grad_weights": np.empty_like(weights),
        }
    call = _kernels.Call(
        chosen,
        checked.value,
        checked.sampling_locations,
        checked.attention_weights,
        **arrays,
    )
    return call.scratch_bytes


# How much


@pytest.mark.parametrize("num_threads", [1, 2, 5, 16])
def test_scratch_memory_grows_with_threads_and_not_with_queries(monkeypatch, num_threads):
    monkeypatch.setattr(reference, "QUERY_BLOCK", 50)
    few = scratch_bytes(*case(queries=1000), num_threads)
    many = scratch_bytes(*case(queries=20_000), num_threads)
    assert many == few
    one = scratch_bytes(*case(queries=1000), 1)
    # A row of value and two of its gradient; a thread's samples.
    assert one <= KEYS * 3 * 4 * 24 + (1 << 17)
    assert many <= (num_threads + 1) * one


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("channels", [1, 32, 1025])
def test_no_memory_is_packed_where_few_rows_are_touched(channels, num_threads):
    value = np.zeros((1, 100_000, 1, channels), np.float32)
    locations = np.zeros((1, 10, 1, 1, 4, 2), np.float32)
    weights = np.zeros((1, 10, 1, 1, 4), np.float32)
    inputs = (value, [(250, 400)], None, locations, weights)
    grad_output = np.zeros((1, 10, channels), np.float32)
    assert scratch_bytes(inputs, None, num_threads) < 1 << 20
    assert scratch_bytes(inputs, grad_output, num_threads) < 1 << 20


@pytest.mark.parametrize(("keys", "channels"), [(1 << 40, 63), (1 << 40, 64), (1 << 46, 1)])
def test_a_row_that_is_broadcast_to_very_many_keys(keys, channels):
    value = np.broadcast_to(np.arange(1, channels + 1, dtype=np.float32), (1, keys, 1, channels))
    height = 1 << keys.bit_length() // 2
    locations = np.full((1, 1, 1, 1, 1, 2), 0.5, np.float32)
    inputs = (value, [(height, keys // height)], None, locations, np.ones((1, 1, 1, 1, 1), np.float32))
    assert msda.forward(*inputs).tolist() == [[list(range(1, channels + 1))]]
    gradients = msda.backward(
        *inputs,
        np.ones((1, 1, channels), np.float32),
        wrt=["sampling_locations", "attention_weights"],
    )
    assert gradients.attention_weights.item() == channels * (channels + 1) // 2
    assert gradients.sampling_locations.tolist() == [[[[[[0, 0]]]]]]


def test_scratch_memory_of_wide_rows():
    """A few rows for each thread, not one for each query of a fixed number."""
    value = np.zeros((1, 4, 1, 1 << 18), np.float32)
    locations = np.zeros((1, 3, 1, 1, 1, 2), np.float32)
    inputs = (value, [(2, 2)], None, locations, np.zeros((1, 3, 1, 1, 1), np.float32))
    assert scratch_bytes(inputs, None, 1) < 24 * (4 << 18)
    assert scratch_bytes(inputs, np.zeros((1, 3, 1 << 18), np.float32), 1) < 24 * (4 << 18)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_scratch_memory_of_a_window(num_threads, monkeypatch):
    """Sums that leave it go to the gradient of value; where that can't hold them, they have memory of their own."""
    monkeypatch.setattr(plan, "TOUCHES_TO_PACK", 0)
    channels = 515

    def scratch(height, dtype, queries=450):
        value = np.zeros((1, 3 * height, 2, channels), dtype)
        locations = np.zeros((1, queries, 2, 1, 4, 2), dtype)
        weights = np.zeros((1, queries, 2, 1, 4), dtype)
        inputs = (value, [(height, 3)], None, locations, weights)
        return scratch_bytes(inputs, np.zeros((1, queries, 2 * channels), dtype), num_threads)

    assert scratch(100, np.float16) == scratch(100, np.float32)  # too small for a window
    assert scratch(200, np.float16, 449) == scratch(200, np.float32, 449)  # too few samples for each row
    more = scratch(200, np.float16) - scratch(200, np.float32)
    assert num_threads * 600 * 4 * channels <= more < num_threads * 600 * 4 * (channels + 16)


@pytest.fixture(scope="module")
def encoder():
    return workloads.make("encoder")


DTYPES = ("float16", "bfloat16", "float32", "float64")
LIMIT = 64 << 20


def of_dtype(name):
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scratch_memory_of_the_encoder(encoder, dtype):
    value, shapes, starts, *floats = encoder.values()
    value, locations, weights, grad_output = (each.astype(of_dtype(dtype)) for each in (value, *floats))
    inputs = (value, shapes, starts, locations, weights)
    for num_threads in (1, 2):
        assert scratch_bytes(inputs, None, num_threads) < LIMIT
        assert scratch_bytes(inputs, grad_output, num_threads) < LIMIT


@needs_proc
@pytest.mark.limits_memory
@pytest.mark.parametrize("dtype", DTYPES)
def test_measured_memory_of_the_encoder(encoder, dtype, tmp_path):
    """The most that a process has in memory during the calls, less what it had with inputs and outputs in place."""
    kind = of_dtype(dtype)
    for name, array in encoder.items():
        array = array.astype(kind) if array.dtype.kind == "f" else array
        np.save(tmp_path / name, array.view(np.uint16) if array.dtype.name == "bfloat16" else array)
    code = """
        import sys
        import numpy as np
        import msda

        folder, dtype = sys.argv[1:]
        names = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights",
                 "grad_output")
        arrays = [np.load(f"{folder}/{name}.npy") for name in names]
        if dtype == "bfloat16":
            import ml_dtypes
            arrays = [each.view(ml_dtypes.bfloat16) if each.dtype == np.uint16 else each for each in arrays]
        *inputs, grad_output = arrays
        value, _, _, locations, weights = inputs
        output = np.ones_like(grad_output)
        gradients = tuple(np.ones_like(each) for each in (value, locations, weights))

        small = value[:, :1], [(1, 1)], None, locations[:, :4, :, :1], weights[:, :4, :, :1]
        msda.forward(*small, num_threads=2)
        msda.backward(*small, grad_output[:, :4], num_threads=2)

        def kibibytes(key):
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith(key))

        before = kibibytes("VmRSS")
        assert kibibytes("VmHWM") - before < 4096, "the most so far was before the calls"
        msda.forward(*inputs, out=output, num_threads=2)
        msda.backward(*inputs, grad_output, out=gradients, num_threads=2)
        print(kibibytes("VmHWM") - before)
    """
    used = int(run(code, tmp_path, dtype)) << 10
    assert used < LIMIT
    # A packed row for each key, and its gradient, is the least. So the measurement sees what it is to see.
    real = 8 if dtype == "float64" else 4
    assert used > 0.9 * 2 * encoder["value"].shape[1] * 32 * real


# Nothing lost


def every_kind_of_call(inputs, grad_output, num_threads):
    """Call with results of every kind, and with errors."""
    value, _, _, locations, weights = inputs
    gradients = tuple(np.empty_like(each) for each in (value, locations, weights))
    msda.forward(*inputs, num_threads=num_threads)
    msda.forward(
        value[:, ::-1], *inputs[1:], out=np.empty_like(grad_output).T.copy().T, num_threads=num_threads
    )
    msda.backward(*inputs, grad_output, num_threads=num_threads)
    msda.backward(*inputs, grad_output, out=gradients, num_threads=num_threads)
    msda.backward(*inputs, grad_output[:, ::-1], wrt=("attention_weights",), coordinate_order="yx")
    for wrong in (
        lambda: msda.forward(value[:, 1:], *inputs[1:]),
        lambda: msda.forward(*inputs[:4], None),
        lambda: msda.forward(value, [(13, -17)], None, locations[:, :, :, :1], weights[:, :, :, :1]),
        lambda: msda.forward(*inputs, out=np.empty((1, 2, 3))),
        lambda: msda.forward(*inputs, num_threads=0),
        lambda: msda.backward(*inputs, grad_output, wrt=("grad",)),
        lambda: msda.backward(*inputs, grad_output, out=(gradients[0], gradients[0], None)),
        lambda: msda.backward(*inputs, grad_output[..., 1:]),
    ):
        with contextlib.suppress(TypeError, ValueError):
            wrong()
            pytest.fail("an error was expected")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_no_object_and_no_array_is_lost(dtype):
    """The interpreter's own count; NumPy reports its arrays to it."""
    inputs, grad_output = case(dtype, queries=10)
    watched = [each for each in (*inputs, grad_output) if isinstance(each, np.ndarray)]
    # The interpreter's cache of attributes keeps the names that reprlib makes up, and tracemalloc its own objects.
    others = [tracemalloc.Filter(False, module.__file__) for module in (reprlib, tracemalloc)]

    def allocated():
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces(others)
        return sum(statistic.size for statistic in snapshot.statistics("filename"))

    def rounds(count):
        for _ in range(count):
            every_kind_of_call(inputs, grad_output, 1)

    rounds(5)
    references = [sys.getrefcount(each) for each in watched]
    tracemalloc.start()
    try:
        rounds(3)
        allocated()  # which warms up the measurement
        before = allocated()
        rounds(60)
        after = allocated()
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(each) for each in watched] == references
    assert after - before < 60 * 16  # less than the smallest object for each round


@needs_proc
@pytest.mark.limits_memory
def test_the_process_does_not_grow():
    """What the interpreter does not count: memory of the kernels, of the OpenMP runtime, of threads."""
    code = """
        import os
        import threading
        import numpy as np
        import msda

        rng = np.random.default_rng(0)
        value = rng.standard_normal((2, 1000, 2, 20), np.float32)
        locations = rng.random((2, 300, 2, 1, 4, 2), np.float32)
        weights = rng.random((2, 300, 2, 1, 4), np.float32)
        grad_output = rng.standard_normal((2, 300, 40), np.float32)
        inputs = (value, [(25, 40)], None, locations, weights)

        def calls():
            for num_threads in (1, 3):
                msda.forward(*inputs, num_threads=num_threads)
                msda.backward(*inputs, grad_output, num_threads=num_threads)

        def rounds(count):
            for turn in range(count):
                calls()
                if turn % 5 == 0:
                    thread = threading.Thread(target=calls)
                    thread.start()
                    thread.join()

        def resident():
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        rounds(40)
        before = resident()
        rounds(80)
        print(resident() - before)
    """
    # A call has 0.2 MB of scratch memory or more, all of them together 60 MB.
    assert int(run(code)) < 4 << 20


def test_interrupted_calls_lose_nothing():
    code = """
        import gc
        import signal
        import tracemalloc
        import numpy as np
        import msda

        class Late(Exception):
            pass

        def handler(*_):
            raise Late

        value = np.ones((1, 4, 1, 32), np.float32)
        locations = np.broadcast_to(np.float32(0.5), (1, 40_000, 1, 1, 1024, 2))
        weights = np.broadcast_to(np.float32(1), (1, 40_000, 1, 1, 1024))
        grad_output = np.broadcast_to(np.float32(1), (1, 40_000, 32))
        inputs = (value, [(2, 2)], None, locations, weights)
        signal.signal(signal.SIGALRM, handler)

        def rounds(count):
            for turn in range(count):
                for call in (
                    lambda: msda.forward(*inputs, num_threads=1 + turn % 3),
                    lambda: msda.backward(*inputs, grad_output, wrt=["value"], num_threads=1 + turn % 3),
                ):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.01)
                        call()
                    except Late:
                        pass
                    else:
                        raise SystemExit("not interrupted")

        def allocated():
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        rounds(6)
        tracemalloc.start()
        rounds(2)
        before = allocated()
        rounds(30)
        print(allocated() - before)
    """
    assert int(run(code)) < 60 * 16


# None left

# A head's rows take 40 MB packed, in either pass, and there are only 16 MB more than are in use.
SHORT = """
    import resource
    import sys
    import numpy as np
    import msda

    rng = np.random.default_rng(0)
    value = rng.standard_normal((1, 160_000, 1, 64), np.float32).astype(np.float16)
    locations = rng.random((1, 40, 1, 1, 4, 2), np.float32)
    weights = rng.random((1, 40, 1, 1, 4), np.float32)
    grad_output = rng.standard_normal((1, 40, 64), np.float32)
    inputs = (value, [(400, 400)], None, locations, weights)
    num_threads = int(sys.argv[1])

    def fresh(fill):
        like = (grad_output, value, locations, weights)
        return [np.full_like(each, fill) for each in like]

    def in_use():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()

    def short_of_memory(call):
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (in_use() + (16 << 20), unlimited[1]))
        try:
            call()
        except MemoryError:
            print("MemoryError")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)

    output, *gradients = fresh(0)
    def calls(out, outs):
        return [
            lambda: msda.forward(*inputs, out=out, num_threads=num_threads),
            lambda: msda.backward(*inputs, grad_output, out=tuple(outs), num_threads=num_threads),
            lambda: msda.backward(*inputs, grad_output, out=(None, *outs[1:]), num_threads=num_threads),
            lambda: msda.backward(*inputs, grad_output, num_threads=num_threads),
        ]

    for call in calls(output, gradients):
        call()
    untouched, *all_untouched = fresh(7)
    for call in calls(untouched, all_untouched):
        short_of_memory(call)
    assert all((each == 7).all() for each in (untouched, *all_untouched))

    again, *all_again = fresh(7)
    for call in calls(again, all_again)[:2]:
        call()
    assert again.tobytes() == output.tobytes()
    assert [each.tobytes() for each in all_again] == [each.tobytes() for each in gradients]
"""


@needs_proc
@pytest.mark.limits_memory
@pytest.mark.parametrize("num_threads", [1, 2])
def test_too_little_memory_is_a_memory_error(num_threads):
    """Whether it is a new result or scratch memory that finds no room."""
    assert run(SHORT, num_threads).split() == ["MemoryError"] * 4


EVERY_ALLOCATION = """
    import sys
    import numpy as np
    import msda

    try:
        from _testcapi import remove_mem_hooks, set_nomemory
    except ImportError:
        print("skip")
        raise SystemExit from None

    rng = np.random.default_rng(0)
    value = rng.standard_normal((1, 20, 2, 5), np.float32)
    locations = rng.random((1, 7, 2, 1, 3, 2), np.float32)
    weights = rng.random((1, 7, 2, 1, 3), np.float32)
    grad_output = rng.standard_normal((1, 7, 10), np.float32)
    inputs = (value, [(4, 5)], None, locations, weights)
    out = [np.empty_like(grad_output)]
    outs = [np.empty_like(each) for each in (value, locations, weights)]

    def forward():
        msda.forward(*inputs, out=out[0], num_threads=1)

    def backward():
        msda.backward(*inputs, grad_output, out=tuple(outs), num_threads=1)

    for call, results in ((forward, out), (backward, outs)):
        call()
        right = [each.copy() for each in results]
        first = failed = succeeded = 0
        while succeeded < 50:  # in a row: there was nothing left to fail
            first += 1
            for each in results:
                each[...] = 7
            set_nomemory(first, first + int(sys.argv[1]))
            try:
                call()
            except MemoryError:
                failed += 1
                succeeded = 0
                expected = [7] * 3
            else:
                succeeded += 1
                expected = right
            finally:
                remove_mem_hooks()
            for result, wanted in zip(results, expected, strict=False):
                assert (result == wanted).all(), f"allocation {first} of {call.__name__}"
        print(failed)
"""


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="from 3.13 on, Python itself crashes where a function finds no memory"
)
@pytest.mark.parametrize("count", [1, 3])
def test_every_single_allocation_may_fail(count):
    """Each of the interpreter's allocations in turn, alone or with the next two."""
    answer = run(EVERY_ALLOCATION, count)
    if answer == "skip":
        pytest.skip("this Python has no _testcapi")
    assert all(int(failed) >= 20 for failed in answer.split())


# Broadcast arrays take no memory, so their shapes may be of any size.
GIANTS = {
    "keys": "value = ones(1, 1 << k, 1, 1); starts = [0]",
    "channels": "value = ones(1, 4, 1, 1 << k); grad_output = ones(1, 1, 1 << k)",
    "points": "locations = ones(1, 1, 1, 1, 1 << k, 2); weights = ones(1, 1, 1, 1, 1 << k)",
    "queries": "locations = ones(1, 1 << k, 1, 1, 1, 2); weights = ones(1, 1 << k, 1, 1, 1);"
    " grad_output = ones(1, 1 << k, 1)",
}
GIANT_CALLS = {
    "forward": "msda.forward(*inputs, num_threads=n)",
    "weights": "msda.backward(*inputs, grad_output, wrt=['attention_weights'], num_threads=n)",
    "value": "msda.backward(*inputs, grad_output, wrt=['value'], num_threads=n)",
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("giant", "call"),
    [(giant, call) for giant in GIANTS for call in GIANT_CALLS if (giant, call) != ("queries", "value")],
)
def test_scratch_memory_beyond_all_numbers_is_a_memory_error(giant, call, num_threads):
    """Sizes in bytes that do not fit into 64 bits, or just do."""
    code = f"""
        import numpy as np
        import msda

        def ones(*shape):
            return np.broadcast_to(np.float16(1), shape)

        n = {num_threads}
        answers = set()
        for k in range(48, 62):
            starts = None
            value, grad_output = ones(1, 4, 1, 1), ones(1, 1, 1)
            locations, weights = ones(1, 1, 1, 1, 1, 2), ones(1, 1, 1, 1, 1)
            try:
                {GIANTS[giant]}
                inputs = (value, [(2, 2)], starts, locations, weights)
            except ValueError:  # more than NumPy has numbers for
                break
            try:
                {GIANT_CALLS[call]}
            except (MemoryError, ValueError) as error:
                answers.add(type(error).__name__)
            else:
                answers.add("no error")
        print(k, *sorted(answers))
    """
    last, *answers = run(code).split()
    assert answers == ["MemoryError"]
    assert int(last) > 56


@pytest.mark.limits_memory
@pytest.mark.parametrize(
    ("sizes", "call"),  # heads, channels, levels
    [
        ((0, 1, 1), "msda.backward(*inputs, grad_output)"),
        ((1, 0, 1), "msda.forward(*inputs)"),
        ((1, 0, 1), "msda.backward(*inputs, grad_output, wrt=['value'])"),
        ((1, 1, 0), "msda.backward(*inputs, grad_output)"),
    ],
)
def test_queries_without_work_take_no_time_and_no_memory(sizes, call):
    """However many there are."""
    code = f"""
        import resource
        import numpy as np
        import msda

        def ones(*shape):
            return np.broadcast_to(np.float32(1), shape)

        heads, channels, levels = {sizes}
        queries = 1 << 48
        value, grad_output = ones(1, 4, heads, channels), ones(1, queries, heads * channels)
        shapes, starts = [(2, 2)] * levels, [0] * levels
        locations = ones(1, queries, heads, levels, 1, 2)
        inputs = (value, shapes, starts, locations, ones(1, queries, heads, levels, 1))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        results = {call}
        results = results if isinstance(results, tuple) else (results,)
        print(all((each == 0).all() for each in results if each is not None))
    """
    assert run(code, timeout=20) == "True"
