/* Four elements out of two vectors of four, by number; gcc and clang spell it differently. */
#ifndef MSDA_SHUFFLE_H
#define MSDA_SHUFFLE_H

#if defined(__clang__)
#define MSDA_SHUFFLE(mask_type, a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define MSDA_SHUFFLE(mask_type, a, b, i, j, k, l) __builtin_shuffle(a, b, (mask_type){i, j, k, l})
#endif

#endif
