"""Multi-scale deformable attention and its gradients on the CPU, with the same bits every time."""

from msda import aclnn, reference
from msda._version import __version__
from msda.api import backward, forward
from msda.gradients import Gradients
from msda.runtime import runtime_info
from msda.threads import get_num_threads, set_num_threads

__all__ = [
    "Gradients",
    "__version__",
    "aclnn",
    "backward",
    "forward",
    "get_num_threads",
    "reference",
    "runtime_info",
    "set_num_threads",
]
