# The kernels of one instruction set: included by _baseline.pyx, _avx2.pyx, ..., each compiled with its own flags.
#
#   arrays.pxi     how the caller's arrays reach the kernels: as bytes
#   strips.pxi     elements of the caller's arrays: read and widened, rounded and written
#   lines.pxi      a large output written past the caches
#   progress.pxi   how far the work items are
#   parts.pxi      the levels, and how they are parted
#   call.pxi       what one call works on: its arrays, how it is cut, the scratch memory of each thread
#   watch.pxi      Ctrl-C
#   prefetch.pxi   how lines are fetched ahead, and how far
#   queries.pxi    what a unit has of the caller's arrays for each query
#   geometry.pxi   where a sample lies: positions, corners, weights
#   touching.pxi   the rows of a sample's corners
#   windows.pxi    where packed rows lie: of a large map in turn
#   groups.pxi     the packed rows that a tile of queries comes to
#   packing.pxi    a head's rows of value, and room for those of its gradient, beside each other
#   blocks.pxi     the gradient of value: the sums of query blocks, and of all
#   forward.pxi    the output
#   backward.pxi   the three gradients
#   running.pxi    work items on threads
#
# rows.h holds the arithmetic of rows, positions.h that of positions, numbers.h that of formats; process.h what
# concerns threads and caches; bounds.h the checks of the debugging build.
#
# Once started, the kernels run without the GIL, raise nothing and allocate nothing.

cimport cython
from cython.parallel cimport prange, threadid
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int64_t, uint8_t, uint16_t, uintptr_t
from libc.string cimport memcpy, memset

ctypedef fused real:
    float
    double

include "arrays.pxi"
include "strips.pxi"
include "lines.pxi"
include "progress.pxi"
include "parts.pxi"
include "call.pxi"
include "watch.pxi"
include "prefetch.pxi"
include "queries.pxi"
include "geometry.pxi"
include "touching.pxi"
include "windows.pxi"
include "groups.pxi"
include "packing.pxi"
include "blocks.pxi"
include "forward.pxi"
include "backward.pxi"
include "running.pxi"
