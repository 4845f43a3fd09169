/* The bounds check of the debugging build (MSDA_BOUNDSCHECK=1), beside Cython's own: of the indices by which an element
 * of the caller's arrays is found (arrays.pxi). What follows that element is walked by pointers, which the sanitizers
 * watch. */
#ifndef MSDA_BOUNDS_H
#define MSDA_BOUNDS_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static inline void msda_check_index(ptrdiff_t i, ptrdiff_t length)
{
#ifdef MSDA_BOUNDSCHECK
    if (i < 0 || i >= length) {
        fprintf(stderr, "msda: index %td of an axis of length %td\n", i, length);
        abort();
    }
#else
    (void)i, (void)length;
#endif
}

#endif
