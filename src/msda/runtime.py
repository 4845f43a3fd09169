"""What runs here: for reports, and to see at a glance why a machine is slow."""

from __future__ import annotations

from typing import Any

from msda import _kernels, threads
from msda._kernels import _system
from msda._version import __version__
from msda.reference import NUMERICS_VERSION


def runtime_info() -> dict[str, Any]:
    """Tell which build of the kernels runs and with how many threads.

    Returns
    -------
    dict
        version : str
            Of this package.
        numerics : int
            Number of the definition of the results; bits change only when it does.
        isa : str
            Instruction set of the kernels in use.
        isas_built, isas_supported : list of str
            The instruction sets that were built, and those that the processor has.
        openmp : bool
            Whether the kernels were built with OpenMP; without it there is one thread.
        num_threads : int
            Threads that a large call uses by default.
        num_threads_source : str
            What determines that number.
        forked : bool
            Whether this is a forked child, which computes on one thread.
    """
    return {
        "version": __version__,
        "numerics": NUMERICS_VERSION,
        "isa": _kernels.isa,
        "isas_built": _kernels.built_isas(),
        "isas_supported": _system.supported_isas(),
        "openmp": _system.openmp(),
        "num_threads": threads.get_num_threads(),
        "num_threads_source": threads.default_source(),
        "forked": threads.forked(),
    }
