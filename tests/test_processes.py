"""Tests of msda in other people's processes: threads, forks, signals, other libraries.

Each test runs a script in a Python process of its own, with a time limit that ends its whole process group:
neither a hang nor a crash reaches the other tests.
"""

import contextlib
import functools
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from msda._kernels import ALL_ISAS, _system, built_isas

# Whatever these are here, the scripts run with what users have by default.
VARIABLES = ("MSDA_NUM_THREADS", "MSDA_ISA", "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_WAIT_POLICY")

needs_openmp = pytest.mark.skipif(not _system.openmp(), reason="built without OpenMP")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc here")

# What the scripts share. It imports neither msda nor torch: their order is part of some tests.
PRELUDE = """
import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
import traceback

import numpy as np


def case(seed=0, scale=1.0):
    # Eight work items: two batch elements, four heads. 300 queries, which blocks(50) makes six blocks.
    rng = np.random.default_rng(seed)
    shapes = [(13, 17), (5, 9)]
    value = rng.standard_normal((2, 266, 4, 20), np.float32) * np.float32(scale)
    locations = rng.random((2, 300, 4, 2, 4, 2), np.float32) * np.float32(1.4) - np.float32(0.2)
    weights = rng.random((2, 300, 4, 2, 4), np.float32)
    grad_output = rng.standard_normal((2, 300, 80), np.float32)
    return (value, shapes, None, locations, weights), grad_output


def bits(case, num_threads=None):
    # The bytes of the four results, as a digest.
    import msda

    inputs, grad_output = case
    results = [msda.forward(*inputs, num_threads=num_threads)]
    results += msda.backward(*inputs, grad_output, num_threads=num_threads)
    return hashlib.sha256(b"".join(array.tobytes() for array in results)).hexdigest()


def team():
    # How many threads ran in this Python thread's last call.
    from msda import threads

    return threads.last_team()


def blocks(queries):
    # Small query blocks, so that blocks of one unit run on several threads.
    from msda import reference

    reference.QUERY_BLOCK = queries


def long_case(queries, points, channels, batch=1):
    # Much work and little memory: broadcast arrays, one level of four pixels, every sample at its centre.
    value = np.ones((batch, 4, 1, channels), np.float32)
    locations = np.broadcast_to(np.float32(0.5), (batch, queries, 1, 1, points, 2))
    weights = np.broadcast_to(np.float32(1), (batch, queries, 1, 1, points))
    grad_output = np.broadcast_to(np.float32(1), (batch, queries, channels))
    return (value, [(2, 2)], None, locations, weights), grad_output


def long_calls():
    # A minute or so on one thread, each.
    import msda

    inputs, grad_output = long_case(400_000, 4096, 32)
    wide, wide_grad_output = long_case(400_000, 64, 1024)
    # Little to compute on each of many maps, which are float16 and so have to be widened first.
    maps = np.broadcast_to(np.float16(1), (40_000, 20_000, 1, 32))
    place, one = np.full((40_000, 1, 1, 1, 1, 2), 0.5, np.float32), np.ones((40_000, 1, 1, 1, 1), np.float32)
    return {
        "many maps": lambda n: msda.forward(maps, [(100, 200)], None, place, one, num_threads=n),
        "forward": lambda n: msda.forward(*inputs, num_threads=n),
        "backward": lambda n: msda.backward(*wide, wide_grad_output, num_threads=n),
        "backward of value": lambda n: msda.backward(*inputs, grad_output, wrt=["value"], num_threads=n),
        "backward of weights": lambda n: msda.backward(
            *wide, wide_grad_output, wrt=["attention_weights"], num_threads=n
        ),
    }


def fork(work, with_=None):
    # Runs work in a forked child and returns the child's exit code.
    child = (with_ or os.fork)()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect_one_thread(case, expected):
    # What a forked child owes its parent.
    for n in (None, 1, 4):
        assert bits(case, n) == expected, n
        assert team() == 1, (n, team())


def say(*words):
    print(*words, flush=True)
"""


class Script:
    """A Python process that runs a script, with everything that it starts in one process group."""

    def __init__(self, folder, code, *, timeout=60, options=(), **environment):
        path = folder / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(code))
        inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        self._errors = folder / "errors"
        with open(self._errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *options, str(path)],
                env=inherited | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.timeout = timeout
        self._late = threading.Timer(timeout, self.kill)
        self._timed_out = False

    def __enter__(self):
        self._late.start()
        return self

    def __exit__(self, *_):
        self._late.cancel()
        self.kill()
        self.process.stdout.close()
        self.process.wait()

    def kill(self):
        self._timed_out = self.process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def line(self):
        """Return the next line of the script's output."""
        line = self.process.stdout.readline()
        if not line:
            self.output()
            pytest.fail("the script ended too early")
        return line.rstrip("\n")

    def output(self):
        """Wait for the script to end and return what it still had to say."""
        output = self.process.stdout.read()
        code = self.process.wait()
        errors = self._errors.read_text()
        assert not self._timed_out, f"still running after {self.timeout} s\n{errors}"
        assert code == 0, f"exit code {code}\n{errors}"
        return output.strip()


@pytest.fixture
def start(tmp_path):
    """Start a script, to be talked to."""
    return functools.partial(Script, tmp_path)


@pytest.fixture
def run(start):
    """Run a script to its end and return its output."""

    def run(code, **how):
        with start(code, **how) as script:
            return script.output()

    return run


# Importing


def test_import_starts_nothing_and_changes_nothing(run):
    code = """
        handlers = [signal.getsignal(n) for n in signal.valid_signals()]
        tasks = lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
        before = tasks()
        environment = dict(os.environ)
        import msda
        assert tasks() == before and threading.active_count() == 1
        assert handlers == [signal.getsignal(n) for n in signal.valid_signals()]
        assert environment == dict(os.environ)
        assert np.float32(1e-40) * np.float32(1) != 0, "subnormal numbers are flushed"
    """
    run(code, options=("-W", "error"))


def test_import_loads_the_standard_library_and_numpy_alone(run):
    code = """
        before = {name.partition(".")[0] for name in sys.modules}
        import msda
        loaded = {name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names
        # Cython registers modules under names of its own, and an editable installation has a finder.
        others = ("_cython", "cython_runtime", "__editable")
        print(*sorted(name for name in loaded if not name.startswith(others)))
    """
    assert run(code) == "msda"


# The instruction set


@pytest.mark.parametrize("isa", ALL_ISAS)
def test_each_instruction_set_is_taken_or_refused_with_a_reason(run, isa):
    code = """
        try:
            import msda
        except ImportError as error:
            print(error)
        else:
            print(msda.runtime_info()["isa"], bits(case()))
    """
    supported, built = _system.supported_isas(), built_isas()
    answer = run(code, MSDA_ISA=isa)
    if isa not in supported:
        assert answer == f"MSDA_ISA={isa!r}: this processor cannot run it, it runs {', '.join(supported)}"
    elif isa not in built:
        assert answer == f"MSDA_ISA={isa!r}: not built in this installation, which has {', '.join(built)}"
    else:
        assert answer == f"{isa} {run('print(bits(case()))')}"


@pytest.mark.parametrize("wrong", ["sse9", "AVX2", " baseline", "baseline,avx2", "_system"])
def test_unknown_instruction_sets(run, wrong):
    code = """
        try:
            import msda
        except ImportError as error:
            print(error)
    """
    expected = f"MSDA_ISA={wrong!r}: no such instruction set, expected one of {', '.join(ALL_ISAS)}"
    assert run(code, MSDA_ISA=wrong) == expected


@pytest.mark.parametrize("unset", [{}, {"MSDA_ISA": ""}], ids=["unset", "empty"])
def test_the_widest_instruction_set_is_the_default(run, unset):
    widest = next(isa for isa in _system.supported_isas() if isa in built_isas())
    assert run("import msda; print(msda.runtime_info()['isa'])", **unset) == widest


def test_an_older_processor_and_a_smaller_build(run):
    """With stand-ins for what the processor has and for what was built."""
    code = """
        import types

        sys.modules["msda._kernels._system"] = types.SimpleNamespace(
            supported_isas=lambda: os.environ["SUPPORTED"].split(), openmp=lambda: False
        )
        for isa in os.environ["NOT_BUILT"].split():
            sys.modules["msda._kernels._" + isa] = None
        try:
            import msda
        except ImportError as error:
            print(error)
        else:
            print(msda.runtime_info()["isa"])
    """
    older = {"SUPPORTED": "baseline", "NOT_BUILT": ""}
    smaller = {"SUPPORTED": "avx512 avx2 baseline", "NOT_BUILT": "avx512 avx2"}
    assert run(code, **older) == "baseline"
    assert run(code, **smaller) == "baseline"
    refused = "MSDA_ISA='avx2': this processor cannot run it, it runs baseline"
    assert run(code, **older, MSDA_ISA="avx2") == refused
    refused = "MSDA_ISA='avx2': not built in this installation, which has baseline"
    assert run(code, **smaller, MSDA_ISA="avx2") == refused


# The number of threads


@needs_openmp
def test_a_bad_number_of_threads_in_the_environment(run):
    code = """
        import msda
        from msda import threads

        expected = bits(case(), 1)
        threads.SMALL_WORK = 10**9
        assert bits(case()) == expected  # a small call does not ask
        threads.SMALL_WORK = 0
        (inputs, grad_output) = case()
        out = np.full((2, 300, 80), 7, np.float32)
        for call in (
            lambda: msda.forward(*inputs, out=out),
            lambda: msda.backward(*inputs, grad_output),
            msda.get_num_threads,
            msda.runtime_info,
        ):
            try:
                call()
            except ValueError as error:
                print(error)
        assert (out == 7).all()
        assert bits(case(), 3) == expected and team() == 3
        msda.set_num_threads(2)
        assert bits(case()) == expected and team() == 2
    """
    message = "the environment variable MSDA_NUM_THREADS must be an integer of at least 1, got 'four'"
    assert run(code, MSDA_NUM_THREADS="four").splitlines() == [message] * 4


@needs_openmp
@pytest.mark.parametrize("limit", [{}, {"OMP_THREAD_LIMIT": "2"}, {"OMP_DYNAMIC": "true"}], ids=str)
def test_a_smaller_team_than_asked_for(run, limit):
    """The OpenMP runtime may start fewer threads than a call has planned for."""
    code = """
        blocks(50)
        expected = bits(case(), 1)
        assert [bits(case(), n) for n in (2, 3, 5, 16, 64)] == [expected] * 5
        print(team())
    """
    assert 1 <= int(run(code, **limit)) <= 2 if "OMP_THREAD_LIMIT" in limit else run(code, **limit)


# Python threads


@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=needs_openmp)])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_gil_is_released(run, which, num_threads):
    code = f"""
        import msda

        inputs, grad_output = long_case(6000, 4096, 32)
        calls = {{
            "forward": lambda n: msda.forward(*inputs, num_threads=n),
            "backward": lambda n: msda.backward(*inputs, grad_output, wrt=["value"], num_threads=n),
        }}
        ticks = []
        done = threading.Event()

        def tick():
            while not done.wait(0.002):
                ticks.append(time.perf_counter())

        thread = threading.Thread(target=tick)
        thread.start()
        begin = time.perf_counter()
        calls[{which!r}]({num_threads})
        end = time.perf_counter()
        done.set()
        thread.join()
        print(end - begin, sum(begin < tick < end for tick in ticks))
    """
    seconds, ticks = run(code).split()
    assert float(seconds) > 0.1, "too short to tell"
    assert int(ticks) >= 20


@needs_openmp
def test_many_python_threads_at_once(run):
    code = """
        import msda
        from concurrent.futures import ThreadPoolExecutor

        blocks(50)
        sys.setswitchinterval(1e-5)
        cases = [case(seed) for seed in range(4)]
        expected = [bits(each, 1) for each in cases]
        start = threading.Barrier(16)

        def work(own):
            start.wait()
            seen = set()
            for turn in range(8):
                k = (own + turn) % 4
                n = 1 + (own + 3 * turn) % 8
                assert bits(cases[k], n) == expected[k], (k, n)
                seen.add(team())
            return seen

        with ThreadPoolExecutor(16) as pool:
            teams = set().union(*pool.map(work, range(16)))
        print(*sorted(teams))
    """
    assert run(code) == "1 2 3 4 5 6 7 8"


@needs_openmp
@needs_proc
def test_python_threads_that_end_take_their_teams_along(run):
    code = """
        tasks = lambda: len(os.listdir("/proc/self/task"))
        expected = bits(case(), 1)
        seen = []
        before = tasks()
        for _ in range(20):
            thread = threading.Thread(target=lambda: seen.append((bits(case(), 4) == expected, team())))
            thread.start()
            thread.join()
        assert seen == [(True, 4)] * 20
        for _ in range(100):
            if tasks() == before:
                break
            time.sleep(0.05)
        print(tasks() - before)
    """
    assert run(code) == "0"


# Forks


@needs_fork
@needs_openmp
@pytest.mark.parametrize(
    "way",
    [
        "os.fork",
        "fork in C",
        "grandchildren",
        "a thread that is not the main one",
        "a thread that has a team of its own",
        "many children at once",
    ],
)
def test_a_forked_child_computes_on_one_thread(run, way):
    code = f"""
        import ctypes

        own = case()
        expected = bits(own, 4)
        assert team() == 4

        def child():
            tasks = "/proc/self/task"
            assert not os.path.isdir(tasks) or len(os.listdir(tasks)) == 1
            expect_one_thread(own, expected)
            assert not os.path.isdir(tasks) or len(os.listdir(tasks)) == 1

        def grandchild():
            assert fork(child) == 0
            child()

        def in_thread(work):
            codes = []
            thread = threading.Thread(target=lambda: codes.append(work()))
            thread.start()
            thread.join()
            return codes[0]

        def with_a_team():
            assert bits(own, 3) == expected and team() == 3
            return fork(child)

        def many():
            threads = [threading.Thread(target=lambda: codes.append(fork(child))) for _ in range(8)]
            codes = []
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return 0 if codes == [0] * 8 else 1

        ways = {{
            "os.fork": lambda: fork(child),
            "fork in C": lambda: fork(child, ctypes.PyDLL(None).fork),
            "grandchildren": lambda: fork(grandchild),
            "a thread that is not the main one": lambda: in_thread(lambda: fork(child)),
            "a thread that has a team of its own": lambda: in_thread(with_a_team),
            "many children at once": many,
        }}
        assert ways[{way!r}]() == 0
        assert bits(own, 4) == expected and team() == 4  # the parent goes on as before
        print("right")
    """
    assert run(code) == "right"


@needs_fork
@needs_openmp
def test_a_fork_while_another_thread_is_inside_a_call(run):
    code = """
        import msda

        own = case()
        expected = bits(own, 4)
        inputs, _ = long_case(12_000, 4096, 32)
        begun = threading.Event()
        outputs = []

        def work():
            begun.set()
            outputs.append(msda.forward(*inputs, num_threads=3))

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        time.sleep(0.05)
        codes = [fork(lambda: expect_one_thread(own, expected)) for _ in range(3)]
        inside = not outputs
        thread.join()
        assert codes == [0, 0, 0], codes
        assert (outputs[0] == 4096).all()
        assert bits(own, 4) == expected and team() == 4
        print(inside)
    """
    assert run(code) == "True"


@needs_fork
@needs_openmp
def test_a_fork_after_another_library_used_openmp(run):
    """The OpenMP runtime of the kernels, called without them."""
    code = """
        import ctypes
        from msda import threads
        import msda

        with open("/proc/self/maps") as maps:
            runtimes = {line.split()[-1] for line in maps if "omp" in os.path.basename(line.split()[-1])}
        for runtime in runtimes:
            library = ctypes.CDLL(runtime)
            if hasattr(library, "GOMP_parallel"):
                any_function = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
                library.GOMP_parallel(any_function, None, 4, 0)
                break
        else:
            raise RuntimeError(f"no GOMP_parallel in {runtimes}")
        assert len(os.listdir("/proc/self/task")) >= 4
        assert threads.last_team() is None

        def child():
            alone = bits(case(), 1)
            expect_one_thread(case(), alone)

        print(fork(child))
    """
    assert run(code) == "0"


MULTIPROCESSING = """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor


    def work(seed):
        digest = bits(case(seed), 4)
        from msda import threads

        return digest, team(), threads.forked()


    def in_process(queue):
        queue.put([work(seed) for seed in range(4)])


    if __name__ == "__main__":
        method = os.environ["METHOD"]
        context = multiprocessing.get_context(method)
        expected = [bits(case(seed), 4) for seed in range(4)]
        assert team() == 4

        with context.Pool(2) as pool:
            answers = pool.map(work, range(4))
        with ProcessPoolExecutor(2, mp_context=context) as executor:
            answers += executor.map(work, range(4))
        queue = context.SimpleQueue()
        process = context.Process(target=in_process, args=(queue,))
        process.start()
        answers += queue.get()
        process.join()

        assert process.exitcode == 0
        assert [digest for digest, _, _ in answers] == expected * 3
        # What is forked from a process that has imported msda has one thread, a fresh process its own.
        teams = {(team, forked) for _, team, forked in answers}
        assert teams == {(1, True) if method == "fork" else (4, False)}
        assert bits(case(0), 4) == expected[0] and team() == 4
        print("right")
"""


@needs_openmp
@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=needs_fork), "spawn", pytest.param("forkserver", marks=needs_fork)]
)
def test_multiprocessing(run, method):
    assert run(MULTIPROCESSING, METHOD=method) == "right"


# Floating-point traps (test_bits.py has the modes that change results)


@needs_openmp
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's feenableexcept")
@pytest.mark.parametrize("when", ["before", "after"])
def test_floating_point_traps(run, when):
    """Set before the first team is born, or after. Numbers that are not finite do not spring them."""
    code = f"""
        import ctypes

        libm = ctypes.CDLL("libm.so.6")
        traps = 0xD if os.uname().machine == "x86_64" else 0x7  # invalid, by zero, overflow
        own = case()
        own[0][0][0, 100, 0] = np.inf
        own[0][0][1, 100, 0] = np.nan
        own[1][:, 7] = 1e38
        blocks(50)
        expected = bits(own, 8) if {when!r} == "after" else None
        if libm.feenableexcept(traps) != 0 or libm.fegetexcept() != traps:
            print("none here")
            raise SystemExit
        digests = [expected or bits(own, 8)]

        def mode():
            # Of SSE too, which fegetexcept does not look at: its masks are bits 7 to 12 at byte 28 of fenv_t.
            environment = (ctypes.c_ubyte * 64)()
            assert libm.fegetenv(environment) == 0
            return libm.fegetexcept(), environment[28] & 0x80 | environment[29] & 0xFF

        before = mode()
        assert os.uname().machine != "x86_64" or before == (traps, 0x19)
        for n in (1, 2, 8):
            digests.append(bits(own, n))
            assert team() == n
            assert mode() == before
        print(len(set(digests)))
    """
    answer = run(code)
    if answer == "none here":
        pytest.skip("this processor has no traps")
    assert answer == "1"


# torch in the same process


@needs_torch
@pytest.mark.parametrize("order", ["torch, msda", "msda, torch"])
def test_torch_in_process(run, order):
    code = f"""
        import {order}

        blocks(50)
        one = torch.ones(1000, 1000)
        assert (one @ one == 1000).all() and one.sum() == 1e6
        expected = bits(case(), 1)
        for n in (2, 8, None):
            assert bits(case(), n) == expected
            assert (one @ one == 1000).all() and one.sum() == 1e6
        tensor = torch.from_numpy(case()[0][0].copy())
        (_, *rest), grad_output = case()
        assert bits(((tensor, *rest), grad_output), 2) == expected
        print(expected)
    """
    assert run(code) == run("blocks(50); print(bits(case(), 1))")


@needs_torch
@needs_openmp
@pytest.mark.parametrize("order", ["torch, msda", "msda, torch"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_flushes_subnormal_numbers(run, order, when):
    code = f"""
        import {order}

        blocks(50)
        own = case(scale=1e-38)
        if {when!r} == "after":
            bits(own, 8)
        small = torch.full((1_000_000,), 1e-40)
        kept = lambda: (bool(small[:1] * 1 == 0), int((small * 1 == 0).sum()))
        assert kept() == (False, 0)
        assert torch.set_flush_denormal(True)
        flushed = kept()
        assert flushed[0]
        for n in (1, 2, 8):
            print(bits(own, n))
            assert team() == n
            assert kept() == flushed
        assert torch.set_flush_denormal(False)
        print(bits(own, 8))
        assert kept()[0] is False
    """
    assert set(run(code).splitlines()) == {run("blocks(50); print(bits(case(scale=1e-38), 1))")}


@needs_torch
@needs_fork
@needs_openmp
@pytest.mark.parametrize("order", ["torch, msda", "msda, torch"])
def test_a_fork_after_torch_used_threads(run, order):
    code = f"""
        import {order}

        torch.set_num_threads(4)
        assert (torch.ones(3_000_000) * 2).sum() == 6e6  # the team of torch's OpenMP runtime
        assert team() is None

        def child():
            expect_one_thread(case(), bits(case(), 1))

        assert fork(child) == 0
        expected = bits(case(), 4)
        assert fork(lambda: expect_one_thread(case(), expected)) == 0
        print("right")
    """
    assert run(code) == "right"


@needs_torch
@needs_fork
@needs_openmp
def test_torch_data_loader(run):
    code = """
        import msda
        import torch


        class Results(torch.utils.data.Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, seed):
                return bits(case(seed), 4), team()


        if __name__ == "__main__":
            expected = [bits(case(seed), 4) for seed in range(6)]
            assert (torch.ones(3_000_000) * 2).sum() == 6e6
            loader = torch.utils.data.DataLoader(
                Results(), batch_size=1, num_workers=2, collate_fn=lambda items: items[0],
                multiprocessing_context="fork",
            )
            assert list(loader) == [(digest, 1) for digest in expected]
            print("right")
    """
    assert run(code) == "right"


# Ctrl-C

INTERRUPTED = """
    import msda

    # Whoever starts the tests in the background may have them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    call = long_calls()[os.environ["CALL"]]
    own = case()
    expected = bits(own, 1)
    for n in map(int, os.environ["THREADS"].split()):
        assert bits(own, n) == expected
        say("ready")
        try:
            call(n)
        except KeyboardInterrupt:
            say("interrupted")
        assert bits(own, n) == expected
        assert team() == n
    say("right")
"""


def processor_ticks(process, task=None):
    """Return the processor time of a process, or of one of its threads, in hundredths of a second."""
    path = f"/proc/{process}/stat" if task is None else f"/proc/{process}/task/{task}/stat"
    with open(path) as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def processor_ticks_of_threads(process):
    ticks = {}
    for task in map(int, os.listdir(f"/proc/{process}/task")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            ticks[task] = processor_ticks(process, task)
    return ticks


def interrupt(script, process=None):
    """Send SIGINT to the script, or a child of it, and return its next line, which has to come soon.

    On a busy machine a second may pass with nothing done, so it is the processor time of all threads together
    that has to stay below a second.
    """
    process = process or script.process.pid
    begin, ticks = time.perf_counter(), processor_ticks(process)
    os.kill(process, signal.SIGINT)
    line = script.line()
    assert time.perf_counter() - begin < 10
    assert processor_ticks(process) - ticks < 100
    return line


@needs_proc
@pytest.mark.parametrize(
    "call", ["forward", "many maps", "backward", "backward of value", "backward of weights"]
)
def test_ctrl_c(start, call):
    numbers = (1, 2, 8) if _system.openmp() else (1,)
    with start(INTERRUPTED, CALL=call, THREADS=" ".join(map(str, numbers))) as script:
        for _ in numbers:
            assert script.line() == "ready"
            time.sleep(0.3)
            assert interrupt(script) == "interrupted"
        assert script.output() == "right"


# Four threads, and much to do for one item alone: the second batch element, or the second of five query blocks,
# which are worked on in rounds, the first of each by the main thread.
UNEVEN = """
    import msda

    signal.signal(signal.SIGINT, signal.default_int_handler)
    queries = 15_000
    blocks(queries)
    batch, parts, long, first = {"items": (4, 1, 1, 0), "rounds": (1, 5, 0, queries)}[os.environ["SHAPE"]]
    inputs, grad_output = long_case(parts * queries, 256, 4096, batch)
    where = np.full((batch, parts * queries), 5, np.float32)
    where[long, first:first + queries] = 0.5
    locations = np.broadcast_to(where[:, :, None, None, None, None], inputs[3].shape)
    inputs = (*inputs[:3], locations, inputs[4])
    own = case()
    expected = bits(own, 4)
    say("ready")
    try:
        msda.backward(*inputs, grad_output, wrt=["value"], num_threads=4)
    except KeyboardInterrupt:
        say("interrupted")
    assert bits(own, 4) == expected
    say("right")
"""


def main_thread_waits(script):
    """Whether the script's main thread comes to wait while another one has the long item."""
    process = script.process.pid
    begin = processor_ticks(process)
    while (spent := processor_ticks(process) - begin) < 400:
        assert script.process.poll() is None, "the long item was too short"
        before = processor_ticks_of_threads(process)
        time.sleep(0.2)
        after = processor_ticks_of_threads(process)
        used = {task: after[task] - before[task] for task in before.keys() & after.keys()}
        main = used.pop(process)
        if spent > 150 and sum(used.values()) >= 5 and main <= max(used.values()) // 4:
            return True
    return False


@needs_openmp
@needs_proc
@pytest.mark.parametrize("shape", ["items", "rounds"])
def test_ctrl_c_while_the_main_thread_waits_for_others(start, shape):
    for _ in range(6):
        with start(UNEVEN, SHAPE=shape) as script:
            assert script.line() == "ready"
            if main_thread_waits(script):
                assert interrupt(script) == "interrupted"
                assert script.output() == "right"
                return
        # The main thread has got the long item itself.
    pytest.fail("the main thread never waited")


@needs_openmp
@needs_proc
def test_ctrl_c_reaches_the_main_thread_while_another_thread_computes(start):
    code = """
        import msda

        signal.signal(signal.SIGINT, signal.default_int_handler)
        inputs, _ = long_case(14_000, 4096, 32)
        outputs = []
        thread = threading.Thread(target=lambda: outputs.append(msda.forward(*inputs, num_threads=2)))
        thread.start()
        say("ready")
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            say("interrupted", not outputs)
        thread.join()
        say((outputs[0] == 4096).all())
    """
    with start(code) as script:
        assert script.line() == "ready"
        time.sleep(0.1)
        assert interrupt(script) == "interrupted True"
        assert script.output() == "True"


@needs_fork
@needs_openmp
@needs_proc
def test_ctrl_c_in_a_child_that_another_thread_forked(start):
    """The thread that forked is the child's main thread."""
    code = """
        import msda

        signal.signal(signal.SIGINT, signal.default_int_handler)
        call = long_calls()["forward"]
        own = case()
        expected = bits(own, 4)

        def child():
            say(os.getpid())
            try:
                call(4)
            except KeyboardInterrupt:
                say("interrupted")
            expect_one_thread(own, expected)

        thread = threading.Thread(target=lambda: say(fork(child)))
        thread.start()
        thread.join()
    """
    with start(code) as script:
        child = int(script.line())
        time.sleep(0.3)
        assert interrupt(script, child) == "interrupted"
        assert script.output() == "0"


@pytest.mark.parametrize("num_threads", [1, pytest.param(3, marks=needs_openmp)])
def test_signal_handlers_that_do_not_raise(run, num_threads):
    """They run during the call, may call msda themselves, and change nothing."""
    code = f"""
        import msda

        n = {num_threads}
        own = case()
        expected = bits(own, 1)
        inputs, grad_output = long_case(6000, 2048, 32)
        inside, seen = [], []

        def handler(*_):
            inside.append(time.perf_counter())
            seen.append(bits(own, n) == expected)

        signal.signal(signal.SIGALRM, handler)
        for call, right in (
            (lambda: msda.forward(*inputs, num_threads=n), 2048),
            (lambda: msda.backward(*inputs, grad_output, wrt=["value"], num_threads=n).value, 6000 * 512),
        ):
            inside.clear()
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            begin = time.perf_counter()
            result = call()
            end = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (result == right).all()
            assert sum(begin < when < end for when in inside) >= 3, (end - begin, len(inside))
        assert all(seen)
        print("right")
    """
    assert run(code) == "right"


def test_signal_handlers_that_raise_something_else(run):
    code = """
        import msda

        class Late(Exception):
            pass

        def handler(*_):
            raise Late("after a while")

        signal.signal(signal.SIGALRM, handler)
        for call in long_calls().values():
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                call(2)
            except Late as error:
                print(error)
        print(bits(case(), 2) == bits(case(), 1))
    """
    assert run(code).splitlines() == [*["after a while"] * 5, "True"]


@needs_proc
@pytest.mark.limits_memory
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ctrl_c_ends_a_call_within_a_second_however_many_items_are_left(run, num_threads):
    code = f"""
        import msda

        raised = []

        def handler(*_):
            raised.append(time.monotonic())
            raise KeyboardInterrupt

        def ones(*shape):
            return np.broadcast_to(np.float16(1), shape)

        signal.signal(signal.SIGALRM, handler)
        size = 1 << 28
        out = np.empty((size, 1, 1), np.float16)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            msda.forward(
                ones(size, 1, 1, 1), [(1, 1)], None, ones(size, 1, 1, 1, 1, 2), ones(size, 1, 1, 1, 1), out=out,
                num_threads={num_threads},
            )
        except KeyboardInterrupt:
            print(time.monotonic() - raised[0] < 1)
    """
    assert run(code).split() == ["True"]


@needs_proc
@pytest.mark.parametrize("call", ["many small items", "no samples"])
def test_ctrl_c_where_there_is_little_to_compute(run, call):
    code = f"""
        import msda

        def handler(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handler)
        size = 1 << 24
        one = np.ones((size, 1, 1, 1), np.float32)
        calls = {{
            "many small items": lambda: msda.forward(
                np.broadcast_to(np.float32(1), one.shape), [(1, 1)], None,
                np.broadcast_to(np.float32(0.4), (size, 1, 1, 1, 1, 2)), one[..., None], out=one.copy()[:, :, 0],
            ),
            "no samples": lambda: msda.forward(
                np.ones((1, 1, 1, 1), np.float32), [(1, 1)], None,
                np.empty((1, 1 << 28, 1, 1, 0, 2), np.float32), np.empty((1, 1 << 28, 1, 1, 0), np.float32),
            ),
        }}
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            calls[{call!r}]()
        except KeyboardInterrupt:
            print(time.process_time() - begin < 4)
    """
    assert run(code).split() == ["True"]
