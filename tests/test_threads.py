"""Tests of msda.threads: which number of threads is chosen, and that a forked child has one.

The numbers are tested in this process with a stand-in for the OpenMP runtime, so they do not depend on the
machine. What only a real runtime, a real fork or a real affinity mask can show runs in a process of its own.
"""

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from msda import threads

VARIABLES = ("MSDA_NUM_THREADS", "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", *threads._BINDING_VARIABLES)
LARGE = threads.SMALL_WORK

needs_openmp = pytest.mark.skipif(not threads._system.openmp(), reason="built without OpenMP")
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


class OpenMP:
    """Stands in for the OpenMP runtime: what omp_set_num_threads sets holds in the thread that calls it."""

    def __init__(self, initial):
        self.built_with = True
        self._initial = initial
        self._own = threading.local()

    def openmp(self):
        return self.built_with

    def openmp_max_threads(self):
        return getattr(self._own, "threads", self._initial)

    def omp_set_num_threads(self, n):
        self._own.threads = n


def clear_caches():
    for function in (threads._openmp_thread_limit, threads._openmp_initial_threads, threads._process_cpus):
        function.cache_clear()


@pytest.fixture(autouse=True)
def untouched(monkeypatch, tmp_path):
    """No choice made by anybody, and no cgroup."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_set_by_user", None)
    monkeypatch.setattr(threads, "_CGROUP_MEMBERSHIP", tmp_path / "no such file")
    clear_caches()
    yield
    clear_caches()


@pytest.fixture
def openmp(monkeypatch):
    """A runtime with 6 threads, on a machine that grants this process 6 CPUs."""
    runtime = OpenMP(6)
    monkeypatch.setattr(threads, "_system", runtime)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    return runtime


def python(code, *, timeout=60, **environment):
    """Run code in a new Python process and return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# check_num_threads


class Three:
    def __index__(self):
        return 3


@pytest.mark.parametrize("n", [3, np.int64(3), np.uint8(3), np.array(3), Three()])
def test_check_num_threads_takes_integers(n):
    checked = threads.check_num_threads(n)
    assert (checked, type(checked)) == (3, int)


@pytest.mark.parametrize(("n", "used"), [(256, 256), (257, 256), (10**30, 256), (np.uint64(2**64 - 1), 256)])
def test_check_num_threads_caps(n, used):
    assert threads.check_num_threads(n) == used


@pytest.mark.parametrize(
    "n",
    [
        *(True, np.True_, np.array(True), 2.0, np.float32(2), "2", b"2", None, 1j),
        *([2], (2,), np.array([2]), np.array([1, 2]), int),
    ],
    ids=repr,
)
def test_check_num_threads_refuses_other_types(n):
    with pytest.raises(TypeError, match=r"^num_threads must be an integer of at least 1, got ") as caught:
        threads.check_num_threads(n)
    assert str(caught.value).endswith(f" of type {type(n).__name__}")


@pytest.mark.parametrize("n", [0, -1, np.int64(-3), -(10**30)])
def test_check_num_threads_refuses_less_than_one(n):
    with pytest.raises(ValueError, match=r"^num_threads must be at least 1, got "):
        threads.check_num_threads(n)


def test_check_num_threads_messages_name_and_quote():
    with pytest.raises(ValueError, match=r"^--threads must be at least 1, got -2$"):
        threads.check_num_threads(-2, "--threads")
    with pytest.raises(TypeError, match=r"^--threads must be .*, got 'four' of type str$"):
        threads.check_num_threads("four", "--threads")
    with pytest.raises(TypeError) as caught:
        threads.check_num_threads("4" * 10_000)
    assert len(str(caught.value)) < 200


# The order of precedence


def test_cpus_are_the_last_resort(openmp):
    assert (threads.get_num_threads(), threads.default_source()) == (6, "CPUs of this process")


def test_each_rule_overrides_the_next(openmp, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert (threads.get_num_threads(), threads.default_source()) == (5, "OMP_NUM_THREADS")
    monkeypatch.setenv("MSDA_NUM_THREADS", "7")
    assert (threads.get_num_threads(), threads.default_source()) == (7, "MSDA_NUM_THREADS")
    threads.set_num_threads(4)
    assert (threads.get_num_threads(), threads.default_source()) == (4, "set_num_threads")
    threads.set_num_threads(None)
    assert threads.get_num_threads() == 7
    monkeypatch.delenv("MSDA_NUM_THREADS")
    assert threads.get_num_threads() == 5


def test_set_num_threads_checks_and_caps(openmp):
    threads.set_num_threads(np.int32(9))
    assert threads.get_num_threads() == 9
    for wrong, error in ((0, ValueError), (2.0, TypeError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(error, match=r"^n must be "):
            threads.set_num_threads(wrong)
    assert threads.get_num_threads() == 9
    threads.set_num_threads(10**6)
    assert threads.get_num_threads() == threads.MAX_THREADS


# The environment


@pytest.mark.parametrize("name", ["MSDA_NUM_THREADS", "OMP_NUM_THREADS"])
@pytest.mark.parametrize(
    ("text", "used"), [("3", 3), (" 3 ", 3), ("003", 3), ("100000", 256), ("", 6), ("  ", 6)]
)
def test_environment(openmp, monkeypatch, name, text, used):
    monkeypatch.setenv(name, text)
    assert threads.get_num_threads() == used


@pytest.mark.parametrize("text", ["4,2", " 4 , 2 ", "4,2,1", "4,"])
def test_omp_num_threads_may_be_a_list(openmp, monkeypatch, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert threads.get_num_threads() == 4


DIGITS_OF_OTHER_KINDS = ["\N{FULLWIDTH DIGIT FOUR}", "\N{SUPERSCRIPT TWO}"]
BAD = ["abc", "0", "00", "-1", "+4", "1.5", "1e1", "0x4", "4_0", "4 2", *DIGITS_OF_OTHER_KINDS]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("MSDA_NUM_THREADS", text) for text in (*BAD, "4,2")),
        *(("OMP_NUM_THREADS", text) for text in (*BAD, ",4", "0,4", "abc,4")),
    ],
)
def test_bad_environment_is_an_error_where_it_is_needed(openmp, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    message = rf"^the environment variable {name} must be an integer of at least 1.*, got '.*'$"
    for needs_the_default in (
        threads.get_num_threads,
        threads.default_source,
        lambda: threads.for_call(None, LARGE),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            needs_the_default()
        assert repr(text) in str(caught.value)

    assert threads.for_call(3, LARGE) == 3
    assert threads.for_call(None, LARGE - 1) == 1
    threads.set_num_threads(2)
    assert threads.for_call(None, LARGE) == 2


def test_msda_num_threads_hides_a_bad_omp_num_threads(openmp, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    monkeypatch.setenv("MSDA_NUM_THREADS", "4")
    assert threads.get_num_threads() == 4


def test_import_does_not_read_the_environment():
    bad = {"MSDA_NUM_THREADS": "abc", "OMP_THREAD_LIMIT": "abc"}
    assert python("import msda.threads; print(msda.threads.for_call(None, 0))", **bad) == "1"


# Limits put on the OpenMP runtime


def test_a_limit_caps_every_default(openmp, monkeypatch):
    openmp.omp_set_num_threads(2)
    limited = (2, "omp_set_num_threads (threadpoolctl or another library)")
    assert (threads.get_num_threads(), threads.default_source()) == limited
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.get_num_threads() == 2
    monkeypatch.setenv("MSDA_NUM_THREADS", "4")
    assert threads.get_num_threads() == 2
    threads.set_num_threads(5)
    assert (threads.get_num_threads(), threads.default_source()) == limited
    assert threads.for_call(None, LARGE) == 2

    threads.set_num_threads(1)
    assert (threads.get_num_threads(), threads.default_source()) == (1, "set_num_threads")


def test_a_limit_does_not_cap_an_explicit_number(openmp):
    openmp.omp_set_num_threads(2)
    assert threads.for_call(5, LARGE) == 5


def test_the_first_use_may_be_under_a_limit(openmp):
    openmp.omp_set_num_threads(2)
    assert threads.get_num_threads() == 2
    openmp.omp_set_num_threads(6)
    assert threads.get_num_threads() == 6


def test_a_limit_holds_in_its_own_thread(openmp):
    openmp.omp_set_num_threads(2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threads.get_num_threads).result() == 6
    assert threads.get_num_threads() == 2


def test_the_runtimes_own_number_is_no_limit(openmp, monkeypatch):
    """OMP_NUM_THREADS=1 for other libraries, MSDA_NUM_THREADS=4 for this one."""
    monkeypatch.setattr(threads, "_system", OpenMP(1))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MSDA_NUM_THREADS", "4")
    assert threads.get_num_threads() == 4
    threads.set_num_threads(8)
    assert threads.get_num_threads() == 8


def test_a_limit_above_the_runtimes_own_number(openmp, monkeypatch):
    runtime = OpenMP(1)
    monkeypatch.setattr(threads, "_system", runtime)
    monkeypatch.setenv("MSDA_NUM_THREADS", "8")
    runtime.omp_set_num_threads(3)
    assert threads.get_num_threads() == 3
    runtime.omp_set_num_threads(100)
    assert threads.get_num_threads() == 8


def test_omp_thread_limit_caps_the_default(openmp, monkeypatch):
    monkeypatch.setenv("OMP_THREAD_LIMIT", "3")
    assert (threads.get_num_threads(), threads.default_source()) == (3, "OMP_THREAD_LIMIT")
    threads.set_num_threads(4)
    assert threads.get_num_threads() == 3
    threads.set_num_threads(2)
    assert (threads.get_num_threads(), threads.default_source()) == (2, "set_num_threads")
    assert threads.for_call(5, LARGE) == 5


@pytest.mark.parametrize("text", ["", "abc", "0", "-1", "100"])
def test_omp_thread_limit_that_is_none(openmp, monkeypatch, text):
    monkeypatch.setenv("OMP_THREAD_LIMIT", text)
    assert threads.get_num_threads() == 6


def test_one_thread_where_none_can_be_started(openmp, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert (threads.get_num_threads(), threads.default_source()) == (1, "no thread can be started")
    assert threads.get_num_threads() == 6


def test_first_use_at_interpreter_exit():
    code = """
        import atexit
        from msda import threads
        atexit.register(lambda: print(threads.get_num_threads()))
    """
    assert int(python(code)) >= 1


# for_call


def test_for_call(openmp):
    assert threads.for_call(None, 0) == 1
    assert threads.for_call(None, LARGE - 1) == 1
    assert threads.for_call(None, LARGE) == 6
    assert threads.for_call(None, 10**30) == 6
    assert threads.for_call(3, 0) == 3
    assert threads.for_call(np.int64(3), LARGE) == 3
    assert threads.for_call(10**6, 0) == threads.MAX_THREADS
    threads.set_num_threads(2)
    assert threads.for_call(None, LARGE - 1) == 1
    assert threads.for_call(None, LARGE) == 2
    assert threads.for_call(3, LARGE) == 3


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (True, TypeError), ("4", TypeError)])
@pytest.mark.parametrize("state", ["usual", "forked", "without OpenMP"])
def test_for_call_checks_first(openmp, monkeypatch, wrong, error, state):
    openmp.built_with = state != "without OpenMP"
    monkeypatch.setattr(threads, "_forked", state == "forked")
    with pytest.raises(error, match=r"^num_threads must be "):
        threads.for_call(wrong, LARGE)


def test_without_openmp(openmp, monkeypatch):
    openmp.built_with = False
    monkeypatch.setenv("MSDA_NUM_THREADS", "4")
    threads.set_num_threads(5)
    assert (threads.get_num_threads(), threads.default_source()) == (1, "built without OpenMP")
    assert threads.for_call(8, LARGE) == 1
    assert threads.for_call(None, LARGE) == 1


# CPUs of the process


def quota(directory, text, *, version=2):
    """Write the files of one cgroup."""
    directory.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (directory / "cpu.max").write_text(text + "\n")
    else:
        for name, number in zip(("cpu.cfs_quota_us", "cpu.cfs_period_us"), text.split(), strict=True):
            (directory / name).write_text(number + "\n")


@pytest.fixture
def cgroup(tmp_path):
    """A function from the lines of /proc/self/cgroup to the quota; files go under tmp_path."""

    def cpus(*lines):
        membership = tmp_path / "self_cgroup"
        membership.write_text("".join(line + "\n" for line in lines))
        return threads._cgroup_cpus(membership, tmp_path)

    return cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("200000 100000", 2),
        ("200001 100000", 3),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("50000 10000", 5),
        ("max 100000", None),
        ("max", None),
        ("", None),
        ("0 100000", None),
        ("100000 0", None),
        ("nonsense", None),
        ("1 2 3", None),
    ],
)
def test_cgroup_v2(cgroup, tmp_path, text, cpus):
    quota(tmp_path / "user.slice" / "job", text)
    assert cgroup("0::/user.slice/job") == cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("200000 100000", 2), ("150000 100000", 2), ("1 100000", 1), ("-1 100000", None), ("100000 0", None)],
)
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_cgroup_v1(cgroup, tmp_path, mount, text, cpus):
    quota(tmp_path / mount / "job", text, version=1)
    lines = ("9:memory:/elsewhere", "4:cpu,cpuacct:/job", "1:name=systemd:/job", "0::/job")
    assert cgroup(*lines) == cpus


@pytest.mark.parametrize(
    ("outer", "inner", "cpus"), [(2, 4, 2), (4, 2, 2), (2, None, 2), (None, 2, 2), (None, None, None)]
)
@pytest.mark.parametrize(("version", "mount"), [(2, "."), (1, "cpu")])
def test_cgroup_ancestors_count(cgroup, tmp_path, version, mount, outer, inner, cpus):
    no_limit = "max" if version == 2 else "-1"
    for directory, allowed in (("a", outer), ("a/b", None), ("a/b/c", inner)):
        text = f"{no_limit if allowed is None else allowed * 100000} 100000"
        quota(tmp_path / mount / directory, text, version=version)
    quota(tmp_path / mount / "beside", "100000 100000", version=version)
    assert cgroup("0::/a/b/c" if version == 2 else "3:cpu:/a/b/c") == cpus


@pytest.mark.parametrize(("version", "mount"), [(2, "."), (1, "cpu")])
def test_cgroup_of_a_container_that_sees_the_hosts_path(cgroup, tmp_path, version, mount):
    quota(tmp_path / mount, "300000 100000", version=version)
    assert cgroup("0::/docker/0123abcd" if version == 2 else "3:cpu:/docker/0123abcd") == 3
    assert cgroup("0::/" if version == 2 else "3:cpu:/") == 3


def test_cgroup_controllers_are_told_apart(cgroup, tmp_path):
    quota(tmp_path / "cpuset", "100000 100000", version=1)
    quota(tmp_path / "cpuacct", "100000 100000", version=1)
    assert cgroup("2:cpuset:/", "3:cpuacct:/") is None


def test_cgroup_path_may_hold_anything(cgroup, tmp_path):
    name = os.fsdecode(b"b\xff: d")
    quota(tmp_path / name, "300000 100000")
    (tmp_path / "membership").write_bytes(b"0::/b\xff: d\n")
    assert threads._cgroup_cpus(tmp_path / "membership", tmp_path) == 3


def test_what_cannot_be_read_is_no_limit(cgroup, tmp_path):
    assert threads._cgroup_cpus(tmp_path / "missing", tmp_path) is None
    assert threads._cgroup_cpus(tmp_path, tmp_path) is None
    assert cgroup() is None
    assert cgroup("", "nonsense", "1:2") is None
    assert cgroup("0::/job") is None
    (tmp_path / "job" / "cpu.max").mkdir(parents=True)
    assert cgroup("0::/job") is None


@pytest.mark.parametrize(("allowed", "cpus"), [(2, 2), (6, 6), (16, 6)])
def test_process_cpus_with_a_quota(openmp, monkeypatch, tmp_path, allowed, cpus):
    quota(tmp_path / "job", f"{allowed * 100000} 100000")
    (tmp_path / "self_cgroup").write_text("0::/job\n")
    monkeypatch.setattr(threads, "_CGROUP_MEMBERSHIP", tmp_path / "self_cgroup")
    monkeypatch.setattr(threads, "_CGROUP_ROOT", tmp_path)
    assert threads.get_num_threads() == cpus
    monkeypatch.setenv("MSDA_NUM_THREADS", "8")
    assert threads.get_num_threads() == 8


def test_cpus_are_counted_once(openmp, monkeypatch):
    counted = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: counted.append(pid) or {0, 3})
    assert [threads.get_num_threads() for _ in range(3)] == [2, 2, 2]
    assert counted == [os.getpid()]


@pytest.mark.parametrize("count", [4, None])
def test_process_cpus_without_affinity_masks(openmp, monkeypatch, count):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert threads.get_num_threads() == (count or 1)


@pytest.mark.parametrize("name", threads._BINDING_VARIABLES)
def test_process_cpus_where_openmp_binds_the_main_thread(openmp, monkeypatch, name):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv(name, "close")
    assert threads.get_num_threads() == 6


# Python threads


def test_set_and_get_from_many_threads(openmp, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    start = threading.Barrier(8)

    def work(own):
        start.wait()
        seen = set()
        for _ in range(300):
            threads.set_num_threads(own)
            seen.add(threads.get_num_threads())
            seen.add(threads.for_call(None, LARGE))
            threads.set_num_threads(None)
            seen.add(threads.get_num_threads())
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = set().union(*pool.map(work, range(11, 19)))
    assert seen <= {6, *range(11, 19)}
    assert threads.get_num_threads() == 6


# Forks


@pytest.mark.parametrize("sign", ["hook", "process id"])
def test_forked_child_has_one_thread(openmp, monkeypatch, sign):
    assert not threads.forked()
    if sign == "hook":
        monkeypatch.setattr(threads, "_forked", True)
    else:
        monkeypatch.setattr(threads, "_imported_by", os.getppid())
    assert threads.forked()
    monkeypatch.setenv("MSDA_NUM_THREADS", "4")
    threads.set_num_threads(5)
    assert (threads.get_num_threads(), threads.default_source()) == (1, "forked child process")
    assert threads.for_call(8, LARGE) == 1
    assert threads.for_call(None, LARGE) == 1


FORKS = {
    "os.fork": "os.fork",
    "fork in C": "ctypes.PyDLL(None).fork",
    "two forks": "lambda: os.fork() or os.fork()",
    "fork with the importer's process id": "fork_and_keep_id",
}


@needs_fork
@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_real_forks(fork):
    code = f"""
        import ctypes, os, sys
        from msda import threads

        def fork_and_keep_id():
            child = os.fork()
            if child == 0:
                threads._imported_by = os.getpid()
            return child

        threads.set_num_threads(4)
        child = ({fork})()
        if child == 0:
            right = threads.forked() and threads.get_num_threads() == 1 and threads.for_call(4, 10**9) == 1
            os._exit(0 if right else 1)
        _, status = os.waitpid(child, 0)
        if not threads.forked():
            print(os.waitstatus_to_exitcode(status))
        else:  # the child between two forks
            os._exit(os.waitstatus_to_exitcode(status))
    """
    assert python(code) == "0"


@needs_fork
def test_a_child_that_imports_for_itself_is_not_forked():
    code = """
        import os
        child = os.fork()
        if child == 0:
            from msda import threads
            os._exit(int(threads.forked()))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert python(code) == "0"


# The real OpenMP runtime and the real machine


@needs_openmp
def test_threadpoolctl():
    pytest.importorskip("threadpoolctl")
    code = """
        from concurrent.futures import ThreadPoolExecutor
        from threadpoolctl import threadpool_limits
        from msda import threads
        seen = []
        for n in (2, 1, 4):  # the first use is under a limit
            with threadpool_limits(n):
                seen += [threads.get_num_threads(), threads.for_call(5, 10**9)]
        seen.append(threads.get_num_threads())
        with threadpool_limits(2):
            threads.set_num_threads(3)
            seen.append(threads.get_num_threads())
            threads.set_num_threads(1)
            seen.append(threads.get_num_threads())
            threads.set_num_threads(None)
            seen.append(ThreadPoolExecutor(1).submit(threads.get_num_threads).result())
        print(*seen)
    """
    assert python(code, OMP_NUM_THREADS="6") == "2 5 1 5 4 5 6 2 1 6"
    assert python(code, OMP_NUM_THREADS="1", MSDA_NUM_THREADS="6") == "2 5 6 5 4 5 6 2 1 6"


@needs_openmp
def test_variables_with_the_real_runtime():
    code = "from msda import threads; print(threads.get_num_threads())"
    assert python(code, OMP_NUM_THREADS="1", MSDA_NUM_THREADS="4") == "4"
    assert python(code, OMP_NUM_THREADS="5,2") == "5"
    assert python(code, OMP_NUM_THREADS="5", OMP_THREAD_LIMIT="3") == "3"


@needs_openmp
@pytest.mark.parametrize("variable", [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}], ids=str)
def test_binding_with_the_real_runtime(variable):
    code = "from msda import threads; print(threads.get_num_threads())"
    assert python(code, **variable) == python(code)


@needs_openmp
@needs_affinity
def test_affinity():
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from msda import threads
        print(threads.get_num_threads())
    """
    assert python(code) == "1"
    assert python(code, MSDA_NUM_THREADS="3") == "3"


@needs_openmp
@needs_affinity
def test_first_use_in_a_bound_thread():
    code = """
        import os
        from concurrent.futures import ThreadPoolExecutor
        from msda import threads

        def bound():
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            return threads.get_num_threads()

        print(ThreadPoolExecutor(1).submit(bound).result())
    """
    assert python(code) == python("from msda import threads; print(threads.get_num_threads())")


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="no cgroups here")
def test_this_machines_cgroup_is_read():
    found = threads._cgroup_cpus(Path("/proc/self/cgroup"), threads._CGROUP_ROOT)
    assert found is None or found >= 1


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_beyond_all_digits(sign):
    """Python turns no number of thousands of digits into text, or back."""
    if sign > 0:
        assert threads.check_num_threads(10**5000) == threads.MAX_THREADS
    else:
        with pytest.raises(ValueError, match=r"num_threads must be at least 1, got a number of \d+ bits"):
            threads.check_num_threads(-(10**5000))


def test_an_environment_variable_of_thousands_of_digits(monkeypatch):
    monkeypatch.setenv("MSDA_NUM_THREADS", "1" * 5000)
    assert threads._from_environment("MSDA_NUM_THREADS", False) == threads.MAX_THREADS
