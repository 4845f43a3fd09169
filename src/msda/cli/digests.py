"""SHA-256 digests of arrays, to compare results between runs and machines."""

import hashlib
from typing import Any

from numpy.typing import NDArray

# For each float type: the bits of infinity, and of the NaN that stands for every NaN.
_INFINITY_AND_NAN = {
    "float16": (0x7C00, 0x7E00),
    "bfloat16": (0x7F80, 0x7FC0),
    "float32": (0x7F80_0000, 0x7FC0_0000),
    "float64": (0x7FF0_0000_0000_0000, 0x7FF8_0000_0000_0000),
}
_BLOCK = 1 << 16  # elements at a time, so that a large array is not copied whole


def digest(array: NDArray[Any]) -> str:
    """Return the SHA-256 of an array's elements, as 64 hexadecimal digits.

    What is hashed are the little-endian bytes in C order, after every NaN is replaced by the quiet
    positive one without payload. Memory layout and byte order of the array do not matter, nor does
    its shape; its dtype, and the sign of a zero, do. Without a NaN this is
    ``hashlib.sha256(array.tobytes())`` on a little-endian machine.

    Parameters
    ----------
    array : ndarray
        Of float16, bfloat16, float32, float64 or any integer type.
    """
    infinity, nan = _INFINITY_AND_NAN.get(array.dtype.name, (None, None))
    if infinity is None and array.dtype.kind not in "iu":
        raise TypeError(f"no digest is defined for {array.dtype}")
    byte_order, size = array.dtype.str[0], array.dtype.itemsize
    elements = array.view(f"{byte_order}u{size}").reshape(-1)
    sha256 = hashlib.sha256()
    for begin in range(0, elements.size, _BLOCK):
        bits = elements[begin : begin + _BLOCK].astype(f"<u{size}")
        if infinity is not None:
            magnitude = bits & ((1 << (8 * size - 1)) - 1)
            bits[magnitude > infinity] = nan
        sha256.update(bits.tobytes())
    return sha256.hexdigest()
