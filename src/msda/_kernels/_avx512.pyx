"""The kernels, for x86-64 with AVX-512."""

include "kernels.pxi"
