# The modules of all instruction sets have this interface: their stubs take it from here.

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from msda.plan import Plan

@final
class Call:
    def __init__(
        self,
        plan: Plan,
        levels: NDArray[np.int64],
        value: NDArray[Any],
        locations: NDArray[Any],
        weights: NDArray[Any],
        grad_output: NDArray[Any] | None = None,
        output: NDArray[Any] | None = None,
        grad_value: NDArray[Any] | None = None,
        grad_locations: NDArray[Any] | None = None,
        grad_weights: NDArray[Any] | None = None,
    ) -> None: ...
    @property
    def scratch_bytes(self) -> int: ...
    def run(self, scratch: NDArray[np.uint8]) -> int: ...
