/* What is done to one row of channels, or to one sample's four rows: the vector arithmetic of the kernels.
 *
 * Written in GCC/Clang vector extensions, MSDA_VECTOR_BYTES wide, once for float and once for double. The order
 * of sums does not depend on that width: channel c of a dot product belongs to lane c mod LANES, and the lanes
 * are added in halves (docs/numerics.md).
 */
#ifndef MSDA_ROWS_H
#define MSDA_ROWS_H

#include <stddef.h>
#include <stdint.h>
#include "numbers.h"
#include "shuffle.h"

#define MSDA_LANE_BYTES 64 /* the lanes of a dot product: 16 float or 8 double */

#define MSDA_BLOCK 32      /* channels whose sums are held in registers */
#define MSDA_SMALL_BLOCK 8
#if MSDA_VECTOR_BYTES == 64
#undef MSDA_SMALL_BLOCK
#define MSDA_SMALL_BLOCK 16
#endif

/* Without it gcc keeps the sums of an outer loop in memory. */
#if defined(__clang__)
#define MSDA_UNROLL _Pragma("unroll")
#else
#define MSDA_UNROLL _Pragma("GCC unroll 4")
#endif

#define MSDA_JOIN2(a, b) a##b
#define MSDA_JOIN(a, b) MSDA_JOIN2(a, b)
#define NAME(x) MSDA_JOIN(x, SUFFIX)

#define REAL float
#define REAL_BYTES 4
#define MASK int32_t
#define SUFFIX _f32
#include "rows_typed.h"

#define REAL double
#define REAL_BYTES 8
#define MASK int64_t
#define SUFFIX _f64
#include "rows_typed.h"

#endif
