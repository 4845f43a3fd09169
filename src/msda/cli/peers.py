"""The other implementations that ``msda bench`` compares with: what to install, and how to call them.

PyTorch is imported here and nowhere else in the package, and only when a peer is bound to a case.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msda.arguments import FLOAT_NAMES
from msda.cli import cases


class Call(NamedTuple):
    """An implementation with the inputs of one case, ready to be called again and again."""

    enter: Callable[[], None]  # comes first, if something else was called in between
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]  # takes what forward returned; the gradients, perhaps with None among them
    to_numpy: Callable[[Any], NDArray[Any]]  # an output or a gradient in float64


class Peer(NamedTuple):
    """Another implementation."""

    module: str  # is there if the peer is
    distributions: tuple[str, ...]  # to which it belongs
    install: str  # the command
    dtypes: tuple[str, ...]  # in which it computes the same; all floats of a case must have one of them
    bind: Callable[[Mapping[str, NDArray[Any]], Collection[str], int], Call]  # case, wrt, threads

    def is_installed(self) -> bool:
        """Whether the peer is there; it is not imported."""
        return importlib.util.find_spec(self.module) is not None

    def versions(self) -> dict[str, str | None]:
        """Return the versions of its distributions, None for what was not installed as one."""
        found: dict[str, str | None] = dict.fromkeys(self.distributions)
        for name in found:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found


_PACKAGE = "torch_ms_deform_attn"
_DISTRIBUTIONS = ("torch", "torch-ms-deform-attn")
_INSTALL = (
    "pip install torch==2.13.0 setuptools wheel ninja packaging && "
    "pip install --no-build-isolation torch-ms-deform-attn==0.1.1"
)


def _bind_compiled(case: Mapping[str, NDArray[Any]], wrt: Collection[str], num_threads: int) -> Call:
    apply = importlib.import_module(_PACKAGE).MSDeformAttnFunction.apply
    tensors = _tensors(case, wrt)
    *inputs, _ = tensors.values()
    batch = max(1, len(case["value"]))  # all of it in one step
    return _torch_call(lambda: apply(*inputs, batch), tensors, wrt, num_threads)


def _bind_grid_sample(case: Mapping[str, NDArray[Any]], wrt: Collection[str], num_threads: int) -> Call:
    composed = importlib.import_module(_PACKAGE).ms_deform_attn_core_pytorch
    tensors = _tensors(case, wrt)
    value, _, _, locations, weights, _ = tensors.values()
    shapes = case[
        "spatial_shapes"
    ].tolist()  # faster than the tensor, out of which the numbers would be taken
    return _torch_call(lambda: composed(value, shapes, locations, weights), tensors, wrt, num_threads)


PEERS = {
    # C++ for the CPU. Narrow types are widened.
    "torch-ms-deform-attn": Peer(_PACKAGE, _DISTRIBUTIONS, _INSTALL, FLOAT_NAMES, _bind_compiled),
    # What most models in PyTorch fall back to: torch.nn.functional.grid_sample for each level, and a sum. With
    # narrow types it rounds positions to them, and samples somewhere else.
    "grid_sample": Peer(_PACKAGE, _DISTRIBUTIONS, _INSTALL, ("float32", "float64"), _bind_grid_sample),
}


def _tensors(case: Mapping[str, NDArray[Any]], wrt: Collection[str]) -> dict[str, Any]:
    """Return copies of the inputs, in order, in memory of PyTorch's; those in `wrt` require gradients."""
    torch: Any = importlib.import_module("torch")
    tensors = {}
    for name in cases.INPUTS:
        array = case[name].astype(case[name].dtype.newbyteorder("="), order="C")
        if name not in cases.FLOAT_INPUTS:
            tensors[name] = torch.tensor(array.astype(np.int64))
        elif array.dtype.name == "bfloat16":  # unknown to PyTorch as a NumPy dtype
            tensors[name] = torch.tensor(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensors[name] = torch.tensor(array)
    for name in wrt:
        tensors[name].requires_grad_()
    return tensors


def _torch_call(
    forward: Callable[[], Any], tensors: Mapping[str, Any], wrt: Collection[str], num_threads: int
) -> Call:
    torch: Any = importlib.import_module("torch")
    wanted = [tensors[name] for name in cases.FLOAT_INPUTS if name in wrt]
    grad_output = tensors["grad_output"]
    return Call(
        enter=lambda: torch.set_num_threads(num_threads),
        forward=forward,
        # The graph is kept: it may be run again, and is not freed while a clock runs.
        backward=lambda output: torch.autograd.grad(output, wanted, grad_output, retain_graph=True),
        to_numpy=lambda result: result.detach().to(torch.float64).numpy(),
    )
