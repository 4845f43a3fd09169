/* rows.h for one REAL type; included there twice. */

#define WIDTH (MSDA_VECTOR_BYTES / REAL_BYTES)
#define LANES (MSDA_LANE_BYTES / REAL_BYTES)
#define PARTS (LANES / WIDTH)
#define VEC NAME(msda_vec)
#define VEC_MASK NAME(msda_vec_mask)

typedef REAL VEC __attribute__((vector_size(MSDA_VECTOR_BYTES)));
typedef MASK VEC_MASK __attribute__((vector_size(MSDA_VECTOR_BYTES)));

/* Rows may lie at any address. */
typedef REAL NAME(msda_anywhere) __attribute__((vector_size(MSDA_VECTOR_BYTES), aligned(1)));
typedef REAL NAME(msda_one_anywhere) __attribute__((aligned(1)));
MSDA_INLINE VEC NAME(load)(const REAL *p) { return *(const NAME(msda_anywhere) *)p; }
MSDA_INLINE void NAME(store)(REAL *p, VEC v) { *(NAME(msda_anywhere) *)p = v; }

/* The last n < WIDTH channels of a row; what is missing is 0, which leaves a lane's sum as it is. */
MSDA_INLINE VEC NAME(load_tail)(const REAL *p, ptrdiff_t n)
{
    REAL part[WIDTH] = {0};
    for (ptrdiff_t i = 0; i < n; i++) part[i] = ((const NAME(msda_one_anywhere) *)p)[i];
    return NAME(load)(part);
}

/* Bilinear interpolation of WIDTH channels, in the order of the definition. */
typedef struct { VEC sample, by_x, by_y; } NAME(msda_sampled);

MSDA_INLINE NAME(msda_sampled) NAME(interpolate)(VEC v00, VEC v01, VEC v10, VEC v11, REAL dx, REAL dy)
{
    NAME(msda_sampled) r;
    VEC ex = v01 - v00, fx = v11 - v10;
    VEC top = v00 + dx * ex, bottom = v10 + dx * fx;
    r.by_y = bottom - top;
    r.sample = top + dy * r.by_y;
    r.by_x = ex + dy * (fx - ex);
    return r;
}

/* The lanes of three sums a, b and c are added in halves all together. These say what is taken of two vectors, in
 * orders for which there is one instruction: the lower and the upper halves of a and b; then, of the lanes left of a
 * and b and of those of c, again the lower and the upper halves; then, of one vector, lanes 2 and 1 apart. b_at and
 * c_at: where the sums of b and c end up. */
#if WIDTH == 16
#define LOW_HALVES 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_HALVES 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_QUARTERS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define HIGH_QUARTERS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define PAIRS_SWAPPED 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define ONES_SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
enum { NAME(b_at) = 4, NAME(c_at) = 8 };
#elif WIDTH == 8
#define LOW_HALVES 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_HALVES 4, 5, 6, 7, 12, 13, 14, 15
#if REAL_BYTES == 8
#define LOW_QUARTERS 0, 1, 4, 5, 8, 9, 12, 13
#define HIGH_QUARTERS 2, 3, 6, 7, 10, 11, 14, 15
enum { NAME(b_at) = 2, NAME(c_at) = 4 };
#else
#define LOW_QUARTERS 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_QUARTERS 2, 3, 10, 11, 6, 7, 14, 15
enum { NAME(b_at) = 4, NAME(c_at) = 2 };
#endif
#define ONES_SWAPPED 1, 0, 3, 2, 5, 4, 7, 6
#elif WIDTH == 4
#define LOW_HALVES 0, 1, 4, 5
#define HIGH_HALVES 2, 3, 6, 7
#if REAL_BYTES == 8
#define LOW_QUARTERS 0, 4, 2, 6
#define HIGH_QUARTERS 1, 5, 3, 7
enum { NAME(b_at) = 2, NAME(c_at) = 1 };
#else
#define LOW_QUARTERS 0, 2, 4, 6
#define HIGH_QUARTERS 1, 3, 5, 7
enum { NAME(b_at) = 1, NAME(c_at) = 2 };
#endif
#else
#define LOW_HALVES 0, 2
#define HIGH_HALVES 1, 3
#endif

/* A sum of PARTS vectors, added in halves until one is left. */
MSDA_INLINE VEC NAME(one_part)(const VEC *part)
{
#if PARTS == 4
    return (part[0] + part[2]) + (part[1] + part[3]);
#elif PARTS == 2
    return part[0] + part[1];
#else
    return part[0];
#endif
}

MSDA_INLINE void NAME(add_lanes)(VEC a, VEC b, VEC c, REAL *sum_a, REAL *sum_b, REAL *sum_c)
{
    VEC ab = MSDA_SHUFFLE(VEC_MASK, a, b, LOW_HALVES) + MSDA_SHUFFLE(VEC_MASK, a, b, HIGH_HALVES);
    VEC cc = c + MSDA_SHUFFLE(VEC_MASK, c, c, HIGH_HALVES); /* in its lower half */
#if WIDTH == 2
    *sum_a = ab[0];
    *sum_b = ab[1];
    *sum_c = cc[0];
#else
    VEC all = MSDA_SHUFFLE(VEC_MASK, ab, cc, LOW_QUARTERS) + MSDA_SHUFFLE(VEC_MASK, ab, cc, HIGH_QUARTERS);
#ifdef PAIRS_SWAPPED
    all += MSDA_SHUFFLE(VEC_MASK, all, all, PAIRS_SWAPPED);
#endif
#ifdef ONES_SWAPPED
    all += MSDA_SHUFFLE(VEC_MASK, all, all, ONES_SWAPPED);
#endif
    *sum_a = all[0];
    *sum_b = all[NAME(b_at)];
    *sum_c = all[NAME(c_at)];
#endif
}

/* The three dot products of a sample with g: of its value and of its derivatives by x and by y. */
MSDA_INLINE void NAME(dots_of_n)(const REAL *v00, const REAL *v01, const REAL *v10, const REAL *v11,
                                 const REAL *g, REAL dx, REAL dy, ptrdiff_t n,
                                 REAL *by_weight, REAL *by_x, REAL *by_y)
{
    VEC sample[PARTS], along_x[PARTS], along_y[PARTS];
    MSDA_UNROLL
    for (int part = 0; part < PARTS; part++) {
        VEC s = {0}, sx = {0}, sy = {0};
        ptrdiff_t c = part * WIDTH;
        for (; c + WIDTH <= n; c += LANES) {
            NAME(msda_sampled) r = NAME(interpolate)(NAME(load)(v00 + c), NAME(load)(v01 + c),
                                                     NAME(load)(v10 + c), NAME(load)(v11 + c), dx, dy);
            VEC gc = NAME(load)(g + c);
            s += r.sample * gc;
            sx += r.by_x * gc;
            sy += r.by_y * gc;
        }
        if (c < n) {
            NAME(msda_sampled) r = NAME(interpolate)(
                NAME(load_tail)(v00 + c, n - c), NAME(load_tail)(v01 + c, n - c),
                NAME(load_tail)(v10 + c, n - c), NAME(load_tail)(v11 + c, n - c), dx, dy);
            VEC gc = NAME(load_tail)(g + c, n - c);
            s += r.sample * gc;
            sx += r.by_x * gc;
            sy += r.by_y * gc;
        }
        sample[part] = s;
        along_x[part] = sx;
        along_y[part] = sy;
    }
    NAME(add_lanes)(NAME(one_part)(sample), NAME(one_part)(along_x), NAME(one_part)(along_y), by_weight, by_x, by_y);
}

/* What g gives to the four corners of a sample: each row receives weight * g. */
MSDA_INLINE void NAME(scatter_n)(REAL *d00, REAL *d01, REAL *d10, REAL *d11, const REAL *g,
                                 REAL w00, REAL w01, REAL w10, REAL w11, ptrdiff_t n)
{
    ptrdiff_t c = 0;
    for (; c + WIDTH <= n; c += WIDTH) {
        VEC gc = NAME(load)(g + c);
        NAME(store)(d00 + c, NAME(load)(d00 + c) + w00 * gc);
        NAME(store)(d01 + c, NAME(load)(d01 + c) + w01 * gc);
        NAME(store)(d10 + c, NAME(load)(d10 + c) + w10 * gc);
        NAME(store)(d11 + c, NAME(load)(d11 + c) + w11 * gc);
    }
    for (; c < n; c++) {
        ((NAME(msda_one_anywhere) *)d00)[c] += w00 * g[c];
        ((NAME(msda_one_anywhere) *)d01)[c] += w01 * g[c];
        ((NAME(msda_one_anywhere) *)d10)[c] += w10 * g[c];
        ((NAME(msda_one_anywhere) *)d11)[c] += w11 * g[c];
    }
}

/* sum += weight * the sample, where channels are few or left over. The order is that of interpolate(). */
MSDA_INLINE void NAME(msda_add_sample)(REAL *restrict sum, const REAL *v00, const REAL *v01, const REAL *v10,
                                       const REAL *v11, REAL dx, REAL dy, REAL weight, ptrdiff_t n)
{
    typedef const NAME(msda_one_anywhere) *row;
    for (ptrdiff_t c = 0; c < n; c++) {
        REAL top = ((row)v00)[c] + dx * (((row)v01)[c] - ((row)v00)[c]);
        REAL bottom = ((row)v10)[c] + dx * (((row)v11)[c] - ((row)v10)[c]);
        sum[c] += weight * (top + dy * (bottom - top));
    }
}

/* The same for a block of channels, up to MSDA_BLOCK and a multiple of MSDA_SMALL_BLOCK, whose sums stay in
 * registers from sample to sample where the compiler knows n. */
typedef struct { VEC part[MSDA_BLOCK / WIDTH]; } NAME(msda_block);

MSDA_INLINE void NAME(msda_clear_block)(NAME(msda_block) *sum, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n / WIDTH; i++) sum->part[i] = (VEC){0};
}

MSDA_INLINE void NAME(msda_add_block)(NAME(msda_block) *sum, const NAME(msda_block) *other, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n / WIDTH; i++) sum->part[i] += other->part[i];
}

MSDA_INLINE void NAME(msda_store_block)(REAL *to, const NAME(msda_block) *sum, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n / WIDTH; i++) NAME(store)(to + i * WIDTH, sum->part[i]);
}

MSDA_INLINE void NAME(msda_add_sample_to_block)(NAME(msda_block) *sum, const REAL *v00, const REAL *v01,
                                                const REAL *v10, const REAL *v11, REAL dx, REAL dy,
                                                REAL weight, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n / WIDTH; i++) {
        ptrdiff_t c = i * WIDTH;
        NAME(msda_sampled) r = NAME(interpolate)(NAME(load)(v00 + c), NAME(load)(v01 + c),
                                                 NAME(load)(v10 + c), NAME(load)(v11 + c), dx, dy);
        sum->part[i] += weight * r.sample;
    }
}

/* The usual channel counts, known to the compiler, which then unrolls. */
MSDA_INLINE void NAME(msda_dots)(const REAL *v00, const REAL *v01, const REAL *v10, const REAL *v11,
                                 const REAL *g, REAL dx, REAL dy, ptrdiff_t n,
                                 REAL *by_weight, REAL *by_x, REAL *by_y)
{
    if (n == 32)
        NAME(dots_of_n)(v00, v01, v10, v11, g, dx, dy, 32, by_weight, by_x, by_y);
    else if (n == 16)
        NAME(dots_of_n)(v00, v01, v10, v11, g, dx, dy, 16, by_weight, by_x, by_y);
    else
        NAME(dots_of_n)(v00, v01, v10, v11, g, dx, dy, n, by_weight, by_x, by_y);
}

MSDA_INLINE void NAME(msda_scatter)(REAL *d00, REAL *d01, REAL *d10, REAL *d11, const REAL *g,
                                    REAL w00, REAL w01, REAL w10, REAL w11, ptrdiff_t n)
{
    if (n == 32)
        NAME(scatter_n)(d00, d01, d10, d11, g, w00, w01, w10, w11, 32);
    else if (n == 16)
        NAME(scatter_n)(d00, d01, d10, d11, g, w00, w01, w10, w11, 16);
    else
        NAME(scatter_n)(d00, d01, d10, d11, g, w00, w01, w10, w11, n);
}

#undef WIDTH
#undef LANES
#undef PARTS
#undef VEC
#undef VEC_MASK
#undef LOW_HALVES
#undef HIGH_HALVES
#undef LOW_QUARTERS
#undef HIGH_QUARTERS
#undef PAIRS_SWAPPED
#undef ONES_SWAPPED
#undef REAL
#undef REAL_BYTES
#undef MASK
#undef SUFFIX
