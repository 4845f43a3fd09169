/* Where samples lie: from locations to corners, MSDA_PLACED of them at a time; and the rows that many come to.
 *
 * Everything is float64, whatever the compute type: with float32 locations loc * W - 0.5 is then exact, so that
 * floor, the gate and the fractions are right even next to the border of a pixel. Integers up to 2**51 are exact
 * in it, which is why rows are numbered in it too.
 */
#ifndef MSDA_POSITIONS_H
#define MSDA_POSITIONS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "numbers.h"
#include "shuffle.h"

enum {
    MSDA_CORNER_00 = 1, /* (y0, x0), ... */
    MSDA_CORNER_01 = 2,
    MSDA_CORNER_10 = 4,
    MSDA_CORNER_11 = 8,
    MSDA_ALL_CORNERS = 15,
    MSDA_GOES_ON = 16 /* some lie beyond the end of a window of packed rows: at its beginning (touching.pxi) */
};

/* Few samples do. */
MSDA_INLINE int msda_goes_on(int64_t corners) { return __builtin_expect(corners & MSDA_GOES_ON, 0) != 0; }

/* As many as a vector holds: of wider ones gcc compares lane by lane. */
enum { MSDA_PLACED = MSDA_VECTOR_BYTES / 8 };
#if MSDA_VECTOR_BYTES == 64
#define MSDA_ALL(x) {x, x, x, x, x, x, x, x}
#define MSDA_EVEN(a, b) MSDA_SHUFFLE(msda_whole, a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define MSDA_ODD(a, b) MSDA_SHUFFLE(msda_whole, a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#elif MSDA_VECTOR_BYTES == 32
#define MSDA_ALL(x) {x, x, x, x}
#define MSDA_EVEN(a, b) MSDA_SHUFFLE(msda_whole, a, b, 0, 2, 4, 6)
#define MSDA_ODD(a, b) MSDA_SHUFFLE(msda_whole, a, b, 1, 3, 5, 7)
#else
#define MSDA_ALL(x) {x, x}
#define MSDA_EVEN(a, b) MSDA_SHUFFLE(msda_whole, a, b, 0, 2)
#define MSDA_ODD(a, b) MSDA_SHUFFLE(msda_whole, a, b, 1, 3)
#endif

typedef double msda_place __attribute__((vector_size(8 * MSDA_PLACED)));
typedef float msda_place_f32 __attribute__((vector_size(4 * MSDA_PLACED)));
typedef int64_t msda_whole __attribute__((vector_size(8 * MSDA_PLACED)));

/* To the nearest integer: adding 3 * 2**51 leaves no room for a fraction. */
#define MSDA_ROUNDER 0x1.8p52

#define MSDA_FLOOR(x, result)                                                         \
    do {                                                                              \
        msda_place ones = MSDA_ALL(1), nearest = ((x) + MSDA_ROUNDER) - MSDA_ROUNDER; \
        result = nearest - (msda_place)((nearest > (x)) & (msda_whole)ones);          \
    } while (0)

/* location: x, y, x, y, ... of the samples; width and height of their levels, NaN where a level has no pixels;
 * first_row: the row of value at which the level starts. Gives the row of the corner 00, which may lie outside the
 * map, NaN if the sample does not count; which of the corners lie in it, none if the sample does not count; and the
 * fractions. */
MSDA_INLINE void msda_find_corners(const double *location, const double *width, const double *height,
                                   const double *first_row, double *row, int64_t *corners,
                                   msda_place *dx, msda_place *dy)
{
    msda_place first, second, w, h, start, x, y, x0, y0;
    memcpy(&first, location, sizeof first);
    memcpy(&second, location + MSDA_PLACED, sizeof second);
    memcpy(&w, width, sizeof w);
    memcpy(&h, height, sizeof h);
    memcpy(&start, first_row, sizeof start);
    x = MSDA_EVEN(first, second) * w - 0.5;
    y = MSDA_ODD(first, second) * h - 0.5;
    msda_whole counts = (x > -1.0) & (x < w) & (y > -1.0) & (y < h);
    x = (msda_place)((msda_whole)x & counts);
    y = (msda_place)((msda_whole)y & counts);
    MSDA_FLOOR(x, x0);
    MSDA_FLOOR(y, y0);
    msda_whole by_column = ((x0 >= 0.0) & (MSDA_CORNER_00 | MSDA_CORNER_10))
        | ((x0 + 1.0 < w) & (MSDA_CORNER_01 | MSDA_CORNER_11));
    msda_whole by_row = ((y0 >= 0.0) & (MSDA_CORNER_00 | MSDA_CORNER_01))
        | ((y0 + 1.0 < h) & (MSDA_CORNER_10 | MSDA_CORNER_11));
    msda_whole found = counts & by_column & by_row;
    msda_place rows = start + y0 * w + x0;
    rows = (msda_place)((msda_whole)rows | ~counts);
    memcpy(row, &rows, sizeof rows);
    memcpy(corners, &found, sizeof found);
    *dx = x - x0;
    *dy = y - y0;
}

MSDA_INLINE void msda_find_corners_f64(const double *location, const double *width, const double *height,
                                       const double *first_row, double *row, int64_t *corners, double *dx,
                                       double *dy)
{
    msda_place x, y;
    msda_find_corners(location, width, height, first_row, row, corners, &x, &y);
    memcpy(dx, &x, sizeof x);
    memcpy(dy, &y, sizeof y);
}

MSDA_INLINE void msda_find_corners_f32(const double *location, const double *width, const double *height,
                                       const double *first_row, double *row, int64_t *corners, float *dx,
                                       float *dy)
{
    msda_place x, y;
    msda_find_corners(location, width, height, first_row, row, corners, &x, &y);
    msda_place_f32 x32 = __builtin_convertvector(x, msda_place_f32);
    msda_place_f32 y32 = __builtin_convertvector(y, msda_place_f32);
    memcpy(dx, &x32, sizeof x32);
    memcpy(dy, &y32, sizeof y32);
}

/* Of MSDA_PLACED successive samples the lowest and the highest row among `count` queries, which lie `step` samples
 * apart. NaN, the row of a sample that does not count, is neither lower nor higher. */
MSDA_INLINE void msda_find_range(const double *row, ptrdiff_t step, ptrdiff_t count, double *lowest, double *highest)
{
    msda_place low = MSDA_ALL(__builtin_inf()), high = MSDA_ALL(-__builtin_inf()), r;
    for (ptrdiff_t q = 0; q < count; q++) {
        memcpy(&r, row + q * step, sizeof r);
        msda_whole lower = r < low, higher = r > high;
        low = (msda_place)(((msda_whole)r & lower) | ((msda_whole)low & ~lower));
        high = (msda_place)(((msda_whole)r & higher) | ((msda_whole)high & ~higher));
    }
    memcpy(lowest, &low, sizeof low);
    memcpy(highest, &high, sizeof high);
}

/* A whole number of less than 2**51 as an integer. Unlike the processors' own conversion this has a vector form
 * everywhere. */
MSDA_INLINE int64_t msda_to_int64(double x)
{
    double moved = x + MSDA_ROUNDER;
    int64_t bits;
    memcpy(&bits, &moved, 8);
    return bits - 0x4338000000000000;
}

#endif
