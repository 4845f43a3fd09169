/* The four floating-point formats: one element read from, and rounded once into, its bytes. */
#ifndef MSDA_NUMBERS_H
#define MSDA_NUMBERS_H

#include <stdint.h>
#include <string.h>

#define MSDA_INLINE static inline __attribute__((always_inline, unused))

MSDA_INLINE uint32_t msda_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
MSDA_INLINE float msda_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* Elements may lie at any address: memcpy is an unaligned load. */
MSDA_INLINE uint16_t msda_get16(const char *p) { uint16_t u; memcpy(&u, p, 2); return u; }
MSDA_INLINE float msda_get_f32(const char *p) { float x; memcpy(&x, p, 4); return x; }
MSDA_INLINE double msda_get_f64(const char *p) { double x; memcpy(&x, p, 8); return x; }
MSDA_INLINE void msda_put16(char *p, uint16_t u) { memcpy(p, &u, 2); }
MSDA_INLINE void msda_put_f32(char *p, float x) { memcpy(p, &x, 4); }
MSDA_INLINE void msda_put_f64(char *p, double x) { memcpy(p, &x, 8); }

/* float16: the exponent is moved by an exact multiplication, which widens subnormal numbers too. */
MSDA_INLINE float msda_from_f16(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    uint32_t finite = msda_bits(msda_float(magnitude) * 0x1p112f);
    uint32_t special = magnitude | 0x7f800000u;
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    return msda_float(((h & 0x7fff) >= 0x7c00 ? special : finite) | sign);
}

MSDA_INLINE uint16_t msda_to_f16(float x)
{
    uint32_t sign = (msda_bits(x) >> 16) & 0x8000u;
    uint32_t u = msda_bits(x) & 0x7fffffffu;
    /* Normal numbers: to nearest even by integer addition; the carry may reach the exponent, and infinity. */
    uint32_t normal = (u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13;
    /* Below 2**-14: adding 0.5 leaves multiples of 2**-24, float16's smallest step, rounded to nearest even. */
    uint32_t small = msda_bits(msda_float(u) + 0.5f) - 0x3f000000u;
    uint32_t large = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t result = u < 0x38800000u ? small : normal;
    result = u >= 0x47800000u ? large : result;
    return (uint16_t)(result | sign);
}

MSDA_INLINE float msda_from_bf16(uint16_t h) { return msda_float((uint32_t)h << 16); }

MSDA_INLINE uint16_t msda_to_bf16(float x)
{
    uint32_t u = msda_bits(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* float64 to float32, rounded to odd: what is then rounded to 11 bits or fewer has been rounded once in effect. */
MSDA_INLINE float msda_to_odd(double x)
{
    float f = (float)x;
    uint32_t u = msda_bits(f);
    int inexact = (double)f != x && x == x;
    int too_large = __builtin_fabs((double)f) > __builtin_fabs(x);
    return msda_float(inexact ? (u - (uint32_t)too_large) | 1u : u);
}

#endif
