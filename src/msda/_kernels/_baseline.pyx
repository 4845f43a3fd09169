"""The kernels, for any processor of the architecture."""

include "kernels.pxi"
