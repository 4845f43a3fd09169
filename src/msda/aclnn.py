"""The two-phase interface of Ascend's aclnnMultiScaleDeformableAttentionGrad, on NumPy arrays.

In this module alone names, limits, statuses and the order of the checks are the operator's own, so that C++
code can be read across. docs/ascend.md compares the two, docs/limits.md lists every limit.

Phase 1 checks the arguments and makes an executor. Phase 2 runs it in the caller's workspace and allocates
nothing that grows with the data.
"""

from __future__ import annotations

import enum
import operator
import os
import threading
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from msda import _kernels, arguments, plan, threads
from msda.arguments import AXES, Inputs, Shapes
from msda.plan import Plan

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "AclnnStatus",
    "aclGetRecentErrMsg",
    "aclOpExecutor",
    "aclnnMultiScaleDeformableAttentionGrad",
    "aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize",
]


class AclnnStatus(enum.IntEnum):
    """What both phases return."""

    ACLNN_SUCCESS = 0
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002


_FLOATS = ("float32", "float16", "bfloat16")
_INTEGERS = ("int32", "int64")
_INPUTS: dict[str, tuple[str, ...]] = {  # with the dtypes accepted
    "value": _FLOATS,
    "spatialShape": _INTEGERS,
    "levelStartIndex": _INTEGERS,
    "location": _FLOATS,
    "attnWeight": _FLOATS,
    "gradOutput": _FLOATS,
}
_OUTPUTS = {"gradValue": "value", "gradLocation": "location", "gradAttnWeight": "attnWeight"}

# An axis of an array, the lengths that the operator takes, and the same in words.
_LIMITS = (
    ("value", "channels", range(0, 257, 8), "a multiple of 8 and at most 256"),
    ("location", "num_queries", range(500000), "less than 500000"),
    ("spatialShape", "num_levels", range(17), "at most 16"),
    ("value", "num_heads", range(17), "at most 16"),
    ("location", "num_points", range(17), "at most 16"),
)
_SHARED_AXES = ("bs", "num_heads", "num_levels", "num_queries", "num_points")


def aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
    value: ArrayLike | None,
    spatialShape: ArrayLike | None,
    levelStartIndex: ArrayLike | None,
    location: ArrayLike | None,
    attnWeight: ArrayLike | None,
    gradOutput: ArrayLike | None,
    gradValue: NDArray[Any] | None,
    gradLocation: NDArray[Any] | None,
    gradAttnWeight: NDArray[Any] | None,
) -> tuple[AclnnStatus, int, aclOpExecutor | None]:
    """Check the arguments and prepare the computation: phase 1.

    The levels are read now, all other arrays whenever the executor runs. Nothing is written.

    Parameters
    ----------
    value : array_like, shape (bs, num_keys, num_heads, channels)
        float32, float16 or bfloat16, as all float arrays here; each may have its own dtype, strides and byte
        order. What is no array yet is converted now.
    spatialShape : array_like of int32 or int64, shape (num_levels, 2)
        Height and width of each level, in pixels.
    levelStartIndex : array_like of int32 or int64, shape (num_levels,)
        The key at which each level starts. Levels may leave gaps, overlap and come in any order.
    location : array_like, shape (bs, num_queries, num_heads, num_levels, num_points, 2)
        Locations (x, y), normalised.
    attnWeight : array_like, shape (bs, num_queries, num_heads, num_levels, num_points)
        Weights of the samples, used as they are (no softmax).
    gradOutput : array_like, shape (bs, num_queries, num_heads * channels)
        The gradient of the output.
    gradValue, gradLocation, gradAttnWeight : ndarray
        Where phase 2 puts the gradients: each of the shape of its input, of any layout and of any of the
        three float dtypes. They must not overlap themselves, each other or an input.

    Returns
    -------
    status : AclnnStatus
        ACLNN_ERR_PARAM_NULLPTR if an array is None, ACLNN_ERR_PARAM_INVALID if anything else is wrong;
        `aclGetRecentErrMsg` says what.
    workspaceSize : int
        The number of bytes that phase 2 needs: 0 where an input is empty, and after a failure.
    executor : aclOpExecutor or None
        None after a failure.
    """
    given = {
        "value": value,
        "spatialShape": spatialShape,
        "levelStartIndex": levelStartIndex,
        "location": location,
        "attnWeight": attnWeight,
        "gradOutput": gradOutput,
        "gradValue": gradValue,
        "gradLocation": gradLocation,
        "gradAttnWeight": gradAttnWeight,
    }
    try:
        arrays, inputs = _checked(given)
        num_threads = threads.for_call(None, plan.work(inputs))
    except (TypeError, ValueError) as error:
        return _refused(error), 0, None
    executor = aclOpExecutor(arrays, inputs, num_threads)
    return AclnnStatus.ACLNN_SUCCESS, executor._workspace_size, executor


def aclnnMultiScaleDeformableAttentionGrad(
    workspace: Buffer | None, workspaceSize: SupportsIndex, executor: aclOpExecutor | None, stream: None
) -> AclnnStatus:
    """Compute the gradients, into the arrays that phase 1 was given: phase 2.

    An executor may run any number of times, also in a forked child process. Threads that run the same one at
    the same time take turns; each needs a workspace of its own.

    Parameters
    ----------
    workspace : writable buffer or None
        Such as a bytearray or an array of bytes; contiguous, at any alignment. What is in it does not matter,
        and what is left in it means nothing. None where `workspaceSize` is 0.
    workspaceSize : int
        How many bytes of `workspace` may be used: at least as many as phase 1 said.
    executor : aclOpExecutor
        What phase 1 gave.
    stream : None
        There are no streams: when the function returns, the gradients are there.

    Returns
    -------
    AclnnStatus
        ACLNN_ERR_PARAM_INVALID if an argument is wrong; then nothing has been written.
    """
    try:
        if not isinstance(executor, aclOpExecutor):
            raise TypeError(f"executor must come from phase 1, got {arguments.described(executor)}")
        if stream is not None:
            raise TypeError(f"stream must be None, got {arguments.described(stream)}")
        scratch = _scratch(workspace, workspaceSize, executor._workspace_size)
        for name, array in executor._arrays.items():
            if arguments.share("workspace", scratch, name, array):
                raise ValueError(f"workspace must not overlap {name}, but they share memory")
    except (TypeError, ValueError) as error:
        return _refused(error)
    # Not in the try: what a signal handler raises while the kernels run is not to become a status.
    if not executor._run(scratch):
        return _refused(ValueError("executor must not be run by a signal handler that interrupted its run"))
    return AclnnStatus.ACLNN_SUCCESS


def aclGetRecentErrMsg() -> str | None:
    """Return the message of the last failure in this thread.

    Returns
    -------
    str or None
        Which argument was wrong, what was given and what is expected. A success leaves the message as it is,
        and so does reading it. None before the first failure.
    """
    return getattr(_last, "message", None)


class aclOpExecutor:
    """A prepared computation: phase 1 makes it, phase 2 runs it.

    It holds on to the arrays that phase 1 was given. The number of threads is fixed.
    """

    def __init__(self, arrays: dict[str, NDArray[Any]], inputs: Inputs, num_threads: int) -> None:
        self._arrays = arrays
        self._inputs = inputs
        self._plan: Plan | None = None
        self._own_scratch: NDArray[np.uint8] | None = None
        self._workspace_size = 0
        self._turns: dict[tuple[int, bool], _Turns] = {}
        if inputs.attention_weights.size == 0:
            return  # The gradient of value is zero; the others are empty.
        empty = inputs.value.size == 0
        self._plan = plan.backward(inputs, 1 if empty else num_threads, arrays["gradValue"])
        scratch_bytes = self._call(self._plan).scratch_bytes
        if empty:
            # Small: no row holds anything, and the limits bound the samples of a query.
            self._own_scratch = np.empty(scratch_bytes, np.uint8)
        else:
            self._workspace_size = scratch_bytes

    def _run(self, scratch: NDArray[np.uint8]) -> bool:
        """Compute; return False if that is what this thread was doing already."""
        process = (os.getpid(), threads.forked())
        turns = self._turns.get(process) or self._turns.setdefault(process, _Turns())
        with turns.lock:
            if turns.taken:
                return False
            try:
                turns.taken = True
                self._compute(scratch)
            finally:
                turns.taken = False
        return True

    def _compute(self, scratch: NDArray[np.uint8]) -> None:
        if self._plan is None:
            self._arrays["gradValue"].fill(0)
            return
        # A forked child has one thread. It does all the items of the plan in turn, and needs less memory.
        here = self._plan._replace(threads=1) if threads.forked() else self._plan
        record = threads.team_record()
        record[0] = self._call(here).run(scratch if self._own_scratch is None else self._own_scratch)

    def _call(self, chosen: Plan) -> _kernels.Call:
        return _kernels.Call(
            chosen,
            self._inputs.value,
            self._inputs.sampling_locations,
            self._inputs.attention_weights,
            grad_output=self._inputs.grad_output,
            grad_value=self._arrays["gradValue"],
            grad_locations=self._arrays["gradLocation"],
            grad_weights=self._arrays["gradAttnWeight"],
        )


class _Turns:
    """Lets one thread of a process at a time run an executor; a forked child starts afresh."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # A signal handler may run in the thread that holds it.
        self.taken = False


# Checks


class _NullPointer(ValueError):
    """An array is missing."""


_last = threading.local()


def _refused(error: Exception) -> AclnnStatus:
    """Turn what a check raised into a status, and keep its message."""
    _last.message = str(error)
    if isinstance(error, _NullPointer):
        return AclnnStatus.ACLNN_ERR_PARAM_NULLPTR
    return AclnnStatus.ACLNN_ERR_PARAM_INVALID


def _checked(given: dict[str, Any]) -> tuple[dict[str, NDArray[Any]], Inputs]:
    """Check the nine arrays of phase 1: first what the operator checks, in its order, then the rest."""
    for name, array in given.items():
        if array is None:
            raise _NullPointer(f"{name} must be an array, got None")

    arrays = {name: _typed(name, array) for name, array in given.items()}
    shapes = {name: arrays[name].shape for name in _INPUTS}

    for name, shape in shapes.items():
        if len(shape) != len(AXES[name]):
            arguments.refuse_rank(name, shape)
    for name, shape in shapes.items():
        if AXES[name][-1] == "2" and shape[-1] != 2:
            raise ValueError(f"{name} has shape {shape}: its last axis must be 2, got {shape[-1]}")
    for name, axis_name, accepted, in_words in _LIMITS:
        axis = AXES[name].index(axis_name)
        if shapes[name][axis] not in accepted:
            raise ValueError(
                f"{name} has shape {shapes[name]}: its {axis_name} (axis {axis}) must be {in_words}, "
                f"got {shapes[name][axis]}"
            )

    for axis_name in _SHARED_AXES:
        first, *others = (name for name in shapes if axis_name in AXES[name])
        length = shapes[first][AXES[first].index(axis_name)]
        for name in others:
            arguments.same_length(name, shapes[name], AXES[name].index(axis_name), first, length)
    _, num_keys, num_heads, channels = shapes["value"]
    grad_output = arguments.parted_into_heads("gradOutput", arrays["gradOutput"], num_heads, channels)
    for name, like in _OUTPUTS.items():
        arguments.check_out_shape(name, arrays[name], shapes[like], f"that of {like}")

    sizes, starts = arrays["spatialShape"], arrays["levelStartIndex"]
    levels = arguments.gather_levels(
        sizes.ravel().tolist(), starts.tolist(), num_keys, ("spatialShape", "levelStartIndex")
    )
    earlier = [(name, arrays[name]) for name in _INPUTS]
    for name in _OUTPUTS:
        arguments.check_out_memory(name, arrays[name], earlier)
        earlier.append((name, arrays[name]))
    return arrays, Inputs(
        Shapes(shapes["value"], shapes["attnWeight"], levels),
        arrays["value"],
        arrays["location"],
        arrays["attnWeight"],
        grad_output,
        np.dtype(np.float32),
        (sizes, starts),
    )


def _typed(name: str, given: Any) -> NDArray[Any]:
    """Read one of the nine arrays and check its dtype."""
    if name in _OUTPUTS:
        return arguments.out_array(name, given, _FLOATS)
    array = arguments.provided(name, given)
    if (arguments.dtype_name(array.dtype) or array.dtype.name) not in _INPUTS[name]:
        arguments.refuse_dtype(name, given, array, f"a {arguments.listed(_INPUTS[name])} array")
    return array


def _scratch(workspace: Any, workspace_size: Any, needed: int) -> NDArray[np.uint8]:
    """Check the workspace of phase 2, and return the bytes of it that may be used."""
    try:
        size = operator.index(workspace_size)
    except Exception:
        described = arguments.described(workspace_size)
        raise TypeError(f"workspaceSize must be an integer, got {described}") from None
    if size < needed:
        raise ValueError(
            f"workspaceSize must be at least {needed}, as phase 1 said, got {arguments.described(size)}"
        )
    scratch = np.empty(0, np.uint8) if workspace is None else _writable_bytes("workspace", workspace)
    if size > scratch.size:
        raise ValueError(
            f"workspace must have workspaceSize = {arguments.described(size)} bytes, got "
            f"{arguments.described(workspace)} of {scratch.size}"
        )
    return scratch[:size]


def _writable_bytes(name: str, given: Any) -> NDArray[np.uint8]:
    """Return the bytes of a buffer."""
    try:
        view = memoryview(given)
    except Exception as error:
        raise TypeError(
            f"{name} must be a buffer, got {arguments.described(given)} ({type(error).__name__}: {error})"
        ) from error
    if view.readonly:
        raise ValueError(f"{name} must be writable, got a read-only buffer")
    if not view.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous, got a buffer of shape {view.shape} and strides {view.strides}"
        )
    # In a format the names of fields stand between colons.
    if any("O" in part for part in view.format.split(":")[::2]):
        raise TypeError(f"{name} must hold no Python objects, got a buffer of format {view.format!r}")
    return np.frombuffer(view, np.uint8)
