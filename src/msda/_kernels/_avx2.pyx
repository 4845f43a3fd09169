"""The kernels, for x86-64 with AVX2."""

include "kernels.pxi"
