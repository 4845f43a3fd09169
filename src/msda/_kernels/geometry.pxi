# Where samples lie: positions, the gate, corners and weights (docs/numerics.md, "Positions").
#
# All samples of a tile of queries are worked out before any row is touched, without branches, a few at a
# time; positions.h has the arithmetic.

cdef extern from "positions.h" nogil:
    enum:
        CORNER_00 "MSDA_CORNER_00"
        CORNER_01 "MSDA_CORNER_01"
        CORNER_10 "MSDA_CORNER_10"
        CORNER_11 "MSDA_CORNER_11"
        ALL_CORNERS "MSDA_ALL_CORNERS"
        GOES_ON "MSDA_GOES_ON"
        MSDA_PLACED
    void msda_find_corners_f32(const double* location, const double* width, const double* height,
                               const double* first_row, double* row, int64_t* corners, float* dx, float* dy)
    void msda_find_corners_f64(const double* location, const double* width, const double* height,
                               const double* first_row, double* row, int64_t* corners, double* dx, double* dy)
    int64_t msda_to_int64(double x)
    void msda_find_range(const double* row, Py_ssize_t step, Py_ssize_t count, double* lowest, double* highest)


cdef void repeat(void* places, Py_ssize_t size, Py_ssize_t count) noexcept nogil:
    # Copies the first of `count` places, of `size` bytes each, to the others.
    cdef char* first = <char*>places
    cdef Py_ssize_t filled = 1, more
    while filled < count:
        more = min(filled, count - filled)
        memcpy(first + filled * size, first, more * size)
        filled += more


cdef void set_levels(Call call, Slot* slot, Py_ssize_t part, real kind) noexcept nogil:
    # Spreads what is known of the part's levels over the samples of a query, and of a tile of queries.
    cdef Py_ssize_t i = 0, k, point, level, samples
    cdef int64_t height, width
    cdef bint pixels
    if slot.levels_part == part:
        return
    slot.levels_part = part
    for k in range(call.parts.begin[part], call.parts.begin[part + 1]):
        level = call.parts.members[k]
        height, width = call.parts.levels[level, 0], call.parts.levels[level, 1]
        pixels = height > 0 and width > 0
        for point in range(call.points):
            # No position is inside a level without pixels: every comparison with NaN is false.
            slot.height[i] = <double>height if pixels else NAN
            slot.width[i] = <double>width if pixels else NAN
            slot.first_row[i] = <double>(call.parts.levels[level, 2] - call.parts.rows[part, 0])
            (<real*>slot.height_rounded)[i] = <real>height
            (<real*>slot.width_rounded)[i] = <real>width
            slot.value_below[i] = width * call.value_step if pixels else 0
            slot.grad_below[i] = width * call.grad_step if pixels else 0
            i += 1
    samples = i
    repeat(slot.height, samples * sizeof(double), call.tile_queries)
    repeat(slot.width, samples * sizeof(double), call.tile_queries)
    repeat(slot.first_row, samples * sizeof(double), call.tile_queries)
    repeat(slot.height_rounded, samples * sizeof(real), call.tile_queries)
    repeat(slot.width_rounded, samples * sizeof(real), call.tile_queries)
    if samples > 0:
        for i in range(SAMPLES_AHEAD):
            slot.value_below[samples + i] = slot.value_below[i % samples]
            slot.grad_below[samples + i] = slot.grad_below[i % samples]


cdef void find_corners(Slot* slot, real* dx, real* dy, Py_ssize_t n) noexcept nogil:
    # MSDA_PLACED at a time; the arrays of a tile have room for that.
    cdef Py_ssize_t i = 0
    while i < n:
        if real is float:
            msda_find_corners_f32(slot.location + 2 * i, slot.width + i, slot.height + i, slot.first_row + i,
                                  slot.row + i, slot.corners + i, dx + i, dy + i)
        else:
            msda_find_corners_f64(slot.location + 2 * i, slot.width + i, slot.height + i, slot.first_row + i,
                                  slot.row + i, slot.corners + i, dx + i, dy + i)
        i += MSDA_PLACED


cdef void find_weights(const real* restrict weight, const real* restrict dx, const real* restrict dy,
                       real* restrict w00, real* restrict w01, real* restrict w10, real* restrict w11,
                       Py_ssize_t n) noexcept nogil:
    # The share of each corner in a sample, times its attention weight.
    cdef Py_ssize_t i
    cdef real one = 1       # a literal would be a double, and its differences would be rounded twice
    for i in range(n):
        w00[i] = weight[i] * ((one - dx[i]) * (one - dy[i]))
        w01[i] = weight[i] * (dx[i] * (one - dy[i]))
        w10[i] = weight[i] * ((one - dx[i]) * dy[i])
        w11[i] = weight[i] * (dx[i] * dy[i])


cdef void multiply(const real* restrict a, const real* restrict b, real* restrict product,
                   Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        product[i] = a[i] * b[i]


cdef void place_samples(Call call, Slot* slot, Py_ssize_t n, real kind) noexcept nogil:
    # All that is to be known of the n samples of a tile before rows are touched.
    cdef real* weight = <real*>slot.weight
    find_corners(slot, <real*>slot.dx, <real*>slot.dy, n)
    if call.want_value:
        find_weights(weight, <real*>slot.dx, <real*>slot.dy, <real*>slot.corner_weight[0],
                     <real*>slot.corner_weight[1], <real*>slot.corner_weight[2],
                     <real*>slot.corner_weight[3], n)
    if call.want_dots:
        multiply(weight, <real*>slot.width_rounded, <real*>slot.weight_x, n)
        multiply(weight, <real*>slot.height_rounded, <real*>slot.weight_y, n)
