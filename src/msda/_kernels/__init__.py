"""Chooses, once, which build of the kernels runs: the widest instruction set that the processor has.

The environment variable MSDA_ISA forces one. What cannot run here, or was not built, is an ImportError.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import TYPE_CHECKING

from msda._kernels import _system as _system

ALL_ISAS = ("avx512", "avx2", "baseline")


def built_isas() -> list[str]:
    """The instruction sets that this installation has kernels for, the widest first."""
    return [isa for isa in ALL_ISAS if importlib.util.find_spec(f"msda._kernels._{isa}") is not None]


def _choose() -> tuple[str, ModuleType]:
    forced = os.environ.get("MSDA_ISA") or None
    supported = _system.supported_isas()
    if forced is None:
        for isa in supported:
            try:
                return isa, importlib.import_module(f"msda._kernels._{isa}")
            except ModuleNotFoundError:
                if isa == "baseline":
                    raise
    if forced not in ALL_ISAS:
        raise ImportError(
            f"MSDA_ISA={forced!r}: no such instruction set, expected one of {', '.join(ALL_ISAS)}"
        )
    if forced not in supported:
        raise ImportError(
            f"MSDA_ISA={forced!r}: this processor cannot run it, it runs {', '.join(supported)}"
        )
    try:
        return forced, importlib.import_module(f"msda._kernels._{forced}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"MSDA_ISA={forced!r}: not built in this installation, which has {', '.join(built_isas())}"
        ) from error


isa, _module = _choose()
if TYPE_CHECKING:
    from msda._kernels._baseline import Call as Call
    from msda._kernels._baseline import Parts as Parts
else:
    Call, Parts = _module.Call, _module.Parts
