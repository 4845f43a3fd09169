"""How many threads a call uses, and what happens after a fork.

Every call asks :func:`for_call`. An explicit ``num_threads`` is obeyed; without one a small call stays on its
own thread and a larger one takes the default, which is the first of these that is set:

1. :func:`set_num_threads`;
2. the environment variable ``MSDA_NUM_THREADS``;
3. the environment variable ``OMP_NUM_THREADS`` (of a list such as ``4,2``, the first number);
4. the CPUs that this process may use: its affinity mask, capped by the CPU quota of its cgroup.

Whichever it is, it is capped by a limit that somebody has put on the OpenMP runtime (threadpoolctl does,
through ``omp_set_num_threads``) and by ``OMP_THREAD_LIMIT``. A limit equal to the number with which that
runtime started looks like none. The two environment variables that choose a number are read at each call that
needs them; the CPUs, the quota and ``OMP_THREAD_LIMIT`` once, by the first call that does.

A forked child never starts a thread: the OpenMP runtime it inherits may believe in a team that only the
parent has, and would wait for it for ever. A build without OpenMP has one thread too. The number of threads
changes no result.

Nothing here takes a lock, so nothing can be left locked in a child: what is shared is one reference, replaced
as a whole, and caches of values that come out the same whoever computes them.
"""

from __future__ import annotations

import functools
import os
import reprlib
import threading
from pathlib import Path, PurePosixPath
from typing import SupportsIndex

from ._kernels import _system
from .arguments import exact_integer

#: No call uses more threads than this, whatever was asked for: the OpenMP runtime ends the process when the
#: system cannot start a team.
MAX_THREADS = 256

#: Calls with less work than this, counted as samples times channels, stay on one thread unless told
#: otherwise. One thread does that in a few tenths of a millisecond; to wake a sleeping team takes one tenth.
SMALL_WORK = 1 << 18

_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")

# With any of these set, the OpenMP runtime binds the main thread to one place when it is loaded.
_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

_set_by_user: int | None = None


def check_num_threads(n: SupportsIndex, name: str = "num_threads") -> int:
    """Check a number of threads that a user gave.

    Parameters
    ----------
    n : int
        Anything with ``__index__`` will do, booleans excepted.
    name : str
        What messages call it.

    Returns
    -------
    int
        `n`, or `MAX_THREADS` if that is less.

    Raises
    ------
    TypeError
        If `n` is no integer.
    ValueError
        If `n` is less than 1.
    """
    if type(n) is int and 1 <= n <= MAX_THREADS:  # the usual case, which is not to take long
        return n
    count, cause = exact_integer(n)
    if count is None:
        given = f"{reprlib.repr(n)} of type {type(n).__name__}"
        raise TypeError(f"{name} must be an integer of at least 1, got {given}") from cause
    if count < 1:
        given = reprlib.repr(n) if count.bit_length() < 1000 else f"a number of {count.bit_length()} bits"
        raise ValueError(f"{name} must be at least 1, got {given}")
    return min(count, MAX_THREADS)


def get_num_threads() -> int:
    """Return the number of threads that a large call in this thread would use now.

    Returns
    -------
    int
        Always 1 in a forked child process and in a build without OpenMP.

    Raises
    ------
    ValueError
        If the number has to come from an environment variable that holds something else.

    See Also
    --------
    set_num_threads : Choose the number for the whole process.

    Notes
    -----
    The first of these that is set decides: `set_num_threads`, the environment variables
    ``MSDA_NUM_THREADS`` and ``OMP_NUM_THREADS``, the CPUs that this process may use (affinity and cgroup
    quota, as found by the first call). A limit set with threadpoolctl, or by anybody else through
    ``omp_set_num_threads``, lowers it, and so does ``OMP_THREAD_LIMIT``. A limit through
    ``omp_set_num_threads`` holds in the thread that set it alone.
    """
    return _default()[0]


def set_num_threads(n: SupportsIndex | None) -> None:
    """Choose the number of threads for calls that do not say ``num_threads`` themselves.

    Parameters
    ----------
    n : int or None
        It holds for the whole process, from the next call on. At most 256 are ever used. None goes back to
        the environment's choice (see `get_num_threads`).
    """
    global _set_by_user
    _set_by_user = None if n is None else check_num_threads(n, "n")


def for_call(num_threads: SupportsIndex | None, work: int) -> int:
    """Return the number of threads that a call should plan for.

    Parameters
    ----------
    num_threads : int or None
        What the user asked for.
    work : int
        Samples times channels; compared with `SMALL_WORK` where the user asked for nothing.
    """
    if num_threads is not None:
        asked = check_num_threads(num_threads)
        return asked if _system.openmp() and not forked() else 1
    return 1 if work < SMALL_WORK else _default()[0]


def default_source() -> str:
    """Return, in words, what determines `get_num_threads`."""
    return _default()[1]


def _default() -> tuple[int, str]:
    """Return the default number of threads and what determines it."""
    if not _system.openmp():
        return 1, "built without OpenMP"
    if forked():
        return 1, "forked child process"
    try:
        threads, source = _chosen()
        openmp_initial = _openmp_initial_threads()
    except RuntimeError:  # the OpenMP runtime could not start one either, and would end the process
        return 1, "no thread can be started"
    # Any other number than the initial one is a limit that somebody has set. To be less than the default is
    # not enough: MSDA_NUM_THREADS may well be more than OMP_NUM_THREADS, from which the initial number comes.
    openmp_now = _system.openmp_max_threads()
    if openmp_now != openmp_initial and openmp_now < threads:
        threads, source = openmp_now, "omp_set_num_threads (threadpoolctl or another library)"
    limit = _openmp_thread_limit()
    if limit is not None and limit < threads:
        threads, source = limit, "OMP_THREAD_LIMIT"
    return min(threads, MAX_THREADS), source


def _chosen() -> tuple[int, str]:
    if (by_user := _set_by_user) is not None:
        return by_user, "set_num_threads"
    for name, takes_list in (("MSDA_NUM_THREADS", False), ("OMP_NUM_THREADS", True)):
        if (from_environment := _from_environment(name, takes_list)) is not None:
            return from_environment, name
    return _process_cpus(), "CPUs of this process"


def _from_environment(name: str, takes_list: bool) -> int | None:
    given = os.environ.get(name)
    if given is None or not (text := given.strip()):
        return None
    if takes_list:
        text = text.partition(",")[0].rstrip()
    if (threads := _positive(text)) is None:
        expected = "an integer of at least 1" + (", or a list that begins with one" if takes_list else "")
        raise ValueError(f"the environment variable {name} must be {expected}, got {reprlib.repr(given)}")
    return threads


def _positive(text: str) -> int | None:
    """Return the positive decimal number in `text`, if that is what it is."""
    if not (text.isascii() and text.isdigit()):  # int() takes more: signs, underscores, other scripts
        return None
    # Python reads no number of thousands of digits, and more than this there never is.
    return int(text) or None if len(text.lstrip("0")) <= 18 else MAX_THREADS


@functools.cache
def _openmp_thread_limit() -> int | None:
    return _positive(os.environ.get("OMP_THREAD_LIMIT", "").strip())


@functools.cache
def _openmp_initial_threads() -> int:
    """Return what ``omp_get_max_threads`` is where nobody has called ``omp_set_num_threads``.

    That call holds for the thread that makes it, so a new thread sees the initial number, even if this thread
    was limited before msda was imported.

    Raises
    ------
    RuntimeError
        If no thread can be started.
    """
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(_system.openmp_max_threads()))
    thread.start()
    thread.join()
    return seen[0]


@functools.cache
def _process_cpus() -> int:
    """Return how many CPUs this process may use."""
    if any(os.environ.get(name) for name in _BINDING_VARIABLES):
        # The main thread's mask says nothing of the process any more; OpenMP looked before it bound it.
        cpus = _openmp_initial_threads()
    elif hasattr(os, "sched_getaffinity"):
        # By process id, that is, the main thread's: the first call may come from a thread bound to one CPU.
        cpus = len(os.sched_getaffinity(os.getpid()))
    else:
        cpus = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    quota = _cgroup_cpus(_CGROUP_MEMBERSHIP, _CGROUP_ROOT)
    return cpus if quota is None else min(cpus, quota)


def _cgroup_cpus(membership: Path, root: Path) -> int | None:
    """Return the CPU quota of this process's cgroup and its ancestors, in whole CPUs, if there is one.

    A container may show its own cgroup at `root` while `membership` names the path seen from the host; since
    the ancestors end at `root`, that is found as well. What cannot be read is no limit.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:  # hierarchy:controllers:/path, where version 2 names no controllers
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = [root]
        elif "cpu" in controllers.split(","):
            mounts = [root / "cpu", root / controllers]
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        quotas += [_cgroup_quota(mount / each) for mount in mounts for each in (group, *group.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cgroup_quota(directory: Path) -> int | None:
    """Return the quota of one cgroup, rounded up to whole CPUs."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # version 2, version 1
        try:
            quota, period = map(int, " ".join((directory / name).read_text() for name in names).split())
        except (OSError, ValueError):  # no such file; or "max", no limit
            continue
        if quota > 0 and period > 0:  # version 1 writes -1 for no limit
            return -(-quota // period)
    return None


_imported_by = os.getpid()
_forked = False


def _after_fork_in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def forked() -> bool:
    """Return whether this process is a forked child of the one that imported msda."""
    # The hook misses forks made by C code. The process id alone would miss a child that got the importer's id
    # again, in a PID namespace of its own or after the importer's end.
    return _forked or os.getpid() != _imported_by


_ran = threading.local()


def team_record() -> list[int | None]:
    """Return this Python thread's record of the team of its last call: one entry, to be overwritten.

    That is all that is left to do once a call has written its results, and cannot fail.
    """
    record: list[int | None] | None = getattr(_ran, "team", None)
    if record is None:
        record = _ran.team = [None]
    return record


def last_team() -> int | None:
    """Return the number of threads that ran in the last call of this Python thread, None before the first."""
    return team_record()[0]
