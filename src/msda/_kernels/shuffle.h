/* Vectors: how wide they are, and one out of the elements of two others, which gcc and clang spell differently. */
#ifndef MSDA_SHUFFLE_H
#define MSDA_SHUFFLE_H

#ifndef MSDA_VECTOR_BYTES
#define MSDA_VECTOR_BYTES 16
#endif

#if defined(__clang__)
#define MSDA_SHUFFLE(mask_type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MSDA_SHUFFLE(mask_type, a, b, ...) __builtin_shuffle(a, b, (mask_type){__VA_ARGS__})
#endif

#endif
