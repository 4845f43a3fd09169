"""The codes by which the kernels know the format of an array."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# The order of the codes is that of strips.pxi; SWAPPED marks the byte order that is not the machine's.
_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
_SWAPPED = 4

_code_of_dtype: dict[np.dtype[Any], int] = {}


def format_code(array: NDArray[Any]) -> int:
    """The number of the array's format and byte order in the kernels."""
    dtype = array.dtype
    code = _code_of_dtype.get(dtype)
    if code is None:
        code = _CODES[dtype.name] + (0 if dtype.isnative else _SWAPPED)
        _code_of_dtype[dtype] = code
    return code
