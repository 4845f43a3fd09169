# The modules of all instruction sets have this interface: their stubs take it from here.

from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from msda.plan import Plan

@final
class Parts:
    def __new__(
        cls,
        levels: NDArray[np.int64],
        members: NDArray[np.int64],
        begin: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> Self: ...
    @property
    def count(self) -> int: ...
    @property
    def level_counts(self) -> list[int]: ...

@final
class Call:
    def __new__(
        cls,
        plan: Plan,
        value: NDArray[Any],
        locations: NDArray[Any],
        weights: NDArray[Any],
        grad_output: NDArray[Any] | None = None,
        output: NDArray[Any] | None = None,
        grad_value: NDArray[Any] | None = None,
        grad_locations: NDArray[Any] | None = None,
        grad_weights: NDArray[Any] | None = None,
    ) -> Self: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def windows(self) -> list[int]: ...
    def run(self, scratch: NDArray[np.uint8]) -> int: ...
