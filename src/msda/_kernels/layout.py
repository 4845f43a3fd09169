"""The codes by which the kernels know the format of an array."""

from typing import Any

import numpy as np

# The order of the codes is that of strips.pxi; SWAPPED marks the byte order that is not the machine's.
_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
_SWAPPED = 4


class _FormatCodes(dict[np.dtype[Any], int]):
    """For a dtype, the number of its format and byte order in the kernels; found once."""

    def __missing__(self, dtype: np.dtype[Any]) -> int:
        code = self[dtype] = _CODES[dtype.name] + (0 if dtype.isnative else _SWAPPED)
        return code


FORMAT_CODES = _FormatCodes()
