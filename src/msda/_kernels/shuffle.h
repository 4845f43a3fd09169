/* A vector out of the elements of two others, by number; gcc and clang spell it differently. */
#ifndef MSDA_SHUFFLE_H
#define MSDA_SHUFFLE_H

#if defined(__clang__)
#define MSDA_SHUFFLE(mask_type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MSDA_SHUFFLE(mask_type, a, b, ...) __builtin_shuffle(a, b, (mask_type){__VA_ARGS__})
#endif

#endif
