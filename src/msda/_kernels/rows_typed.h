/* rows.h for one REAL type; included there twice. */

#define WIDTH (MSDA_VECTOR_BYTES / REAL_BYTES)
#define LANES (MSDA_LANE_BYTES / REAL_BYTES)
#define PARTS (LANES / WIDTH)
#define VEC NAME(msda_vec)
#define QUAD NAME(msda_quad)
#define QUAD_MASK NAME(msda_quad_mask)

typedef REAL VEC __attribute__((vector_size(MSDA_VECTOR_BYTES)));
typedef REAL QUAD __attribute__((vector_size(4 * REAL_BYTES)));
typedef MASK QUAD_MASK __attribute__((vector_size(4 * REAL_BYTES)));

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

/* The lanes of a sum (PARTS vectors) added in halves until four are left. */
MSDA_INLINE void NAME(four_lanes)(const VEC *part, QUAD *four)
{
    QUAD q;
#if PARTS == 4 && REAL_BYTES == 4
    VEC low = part[0] + part[2], high = part[1] + part[3];
    q = low + high;
#elif PARTS == 4
    VEC low = part[0] + part[2], high = part[1] + part[3];
    memcpy(&q, &low, sizeof low);
    memcpy((char *)&q + sizeof low, &high, sizeof high);
#elif PARTS == 2 && REAL_BYTES == 4
    VEC sum = part[0] + part[1];
    QUAD low, high;
    memcpy(&low, &sum, sizeof low);
    memcpy(&high, (char *)&sum + sizeof low, sizeof high);
    q = low + high;
#elif PARTS == 2
    q = part[0] + part[1];
#elif PARTS == 1 && REAL_BYTES == 4
    QUAD a, b, c, d;
    memcpy(&a, (char *)part, sizeof a);
    memcpy(&b, (char *)part + sizeof a, sizeof b);
    memcpy(&c, (char *)part + 2 * sizeof a, sizeof c);
    memcpy(&d, (char *)part + 3 * sizeof a, sizeof d);
    QUAD low = a + c, high = b + d;
    q = low + high;
#else
    QUAD low, high;
    memcpy(&low, (char *)part, sizeof low);
    memcpy(&high, (char *)part + sizeof low, sizeof high);
    q = low + high;
#endif
    *four = q;
}

/* The three dot products of a sample with g: of its value and of its derivatives by x and by y.
 *
 * The four lanes left of each are folded together by one transposition. Adding +0 at the end makes a sum
 * that started from +0 of one that did not. */
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
#if WIDTH == 16
    typedef MASK VEC_MASK __attribute__((vector_size(MSDA_VECTOR_BYTES)));
    VEC ab = MSDA_SHUFFLE(VEC_MASK, sample[0], along_x[0], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
        + MSDA_SHUFFLE(VEC_MASK, sample[0], along_x[0], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    VEC c8 = along_y[0] + MSDA_SHUFFLE(VEC_MASK, along_y[0], along_y[0], 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    VEC four = MSDA_SHUFFLE(VEC_MASK, ab, c8, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 16, 17, 18, 19)
        + MSDA_SHUFFLE(VEC_MASK, ab, c8, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 20, 21, 22, 23);
    four += MSDA_SHUFFLE(VEC_MASK, four, four, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    four += MSDA_SHUFFLE(VEC_MASK, four, four, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    four += (VEC){0};
    *by_weight = four[0];
    *by_x = four[4];
    *by_y = four[8];
#else
    QUAD a, b, c, none = {0};
    NAME(four_lanes)(sample, &a);
    NAME(four_lanes)(along_x, &b);
    NAME(four_lanes)(along_y, &c);
    /* Two steps of halves: lane j with j + 2, then with j + 1. */
    QUAD ab = MSDA_SHUFFLE(QUAD_MASK, a, b, 0, 4, 1, 5) + MSDA_SHUFFLE(QUAD_MASK, a, b, 2, 6, 3, 7);
    QUAD c0 = MSDA_SHUFFLE(QUAD_MASK, c, none, 0, 4, 1, 5) + MSDA_SHUFFLE(QUAD_MASK, c, none, 2, 6, 3, 7);
    QUAD sums = MSDA_SHUFFLE(QUAD_MASK, ab, c0, 0, 1, 4, 5) + MSDA_SHUFFLE(QUAD_MASK, ab, c0, 2, 3, 6, 7);
    sums += none;
    *by_weight = sums[0];
    *by_x = sums[1];
    *by_y = sums[2];
#endif
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
#undef QUAD
#undef QUAD_MASK
#undef REAL
#undef REAL_BYTES
#undef MASK
#undef SUFFIX
