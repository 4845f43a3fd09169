# The three gradients of a tile of queries: dot products for locations and weights, scattered rows for value.

cdef extern from "rows.h" nogil:
    void msda_dots_f32(const float* v00, const float* v01, const float* v10, const float* v11, const float* g,
                       float dx, float dy, Py_ssize_t n, float* by_weight, float* by_x, float* by_y)
    void msda_dots_f64(const double* v00, const double* v01, const double* v10, const double* v11,
                       const double* g, double dx, double dy, Py_ssize_t n, double* by_weight, double* by_x,
                       double* by_y)
    void msda_scatter_f32(float* d00, float* d01, float* d10, float* d11, const float* g, float w00, float w01,
                          float w10, float w11, Py_ssize_t n)
    void msda_scatter_f64(double* d00, double* d01, double* d10, double* d11, const double* g, double w00,
                          double w01, double w10, double w11, Py_ssize_t n)


cdef enum:
    USUAL_CHANNELS = 32


cdef inline void dots(Rows v, const real* g, const Slot* slot, Py_ssize_t i, Py_ssize_t channels,
                      real* by_weight, real* by_x, real* by_y) noexcept nogil:
    # The dot products of sample i of the tile, and of its derivatives, with g.
    if real is float:
        msda_dots_f32(
            <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10, <real*>v.corner_11, g,
            (<real*>slot.dx)[i], (<real*>slot.dy)[i], channels, by_weight, by_x, by_y)
    else:
        msda_dots_f64(
            <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10, <real*>v.corner_11, g,
            (<real*>slot.dx)[i], (<real*>slot.dy)[i], channels, by_weight, by_x, by_y)


cdef inline void scatter(Rows d, const real* g, const Slot* slot, Py_ssize_t i, Py_ssize_t channels) noexcept nogil:
    # Adds what g gives to the corners of sample i of the tile.
    if real is float:
        msda_scatter_f32(
            <real*>d.corner_00, <real*>d.corner_01, <real*>d.corner_10, <real*>d.corner_11, g,
            (<real*>slot.corner_weight[0])[i], (<real*>slot.corner_weight[1])[i],
            (<real*>slot.corner_weight[2])[i], (<real*>slot.corner_weight[3])[i], channels)
    else:
        msda_scatter_f64(
            <real*>d.corner_00, <real*>d.corner_01, <real*>d.corner_10, <real*>d.corner_11, g,
            (<real*>slot.corner_weight[0])[i], (<real*>slot.corner_weight[1])[i],
            (<real*>slot.corner_weight[2])[i], (<real*>slot.corner_weight[3])[i], channels)


cdef inline void touch_samples(Call call, const Slot* slot, Py_ssize_t first, Py_ssize_t samples, Py_ssize_t last,
                               const real* g, Py_ssize_t channels, bint packed, bint want_dots, bint want_value,
                               Py_ssize_t fetched_bytes) noexcept nogil:
    # The samples of one query, which are those from `first` on of the tile of `last` samples. `fetched_bytes` is
    # call.fetched_bytes, unless that is 0 and nothing is fetched ahead.
    cdef Py_ssize_t value_step = call.value_step, i, s, ahead
    cdef bint fetch = call.fetched_bytes > 0
    cdef char* value_base = slot.value_base
    cdef char* outside = slot.outside_value
    cdef const int64_t* corners = slot.corners
    cdef const int64_t* value_row = slot.value_row
    cdef const Py_ssize_t* value_below = slot.value_below
    cdef real* by_weight = <real*>slot.by_weight
    cdef real* by_location = <real*>slot.by_location
    cdef const real* weight_x = <const real*>slot.weight_x
    cdef const real* weight_y = <const real*>slot.weight_y
    cdef real dot, dot_x, dot_y
    cdef Rows v
    for s in range(samples):
        i = first + s
        ahead = i + SAMPLES_AHEAD
        if fetch and ahead < last and corners[ahead] == ALL_CORNERS:
            prefetch_rows(value_base, value_row[ahead], value_step, value_below[s + SAMPLES_AHEAD], fetched_bytes)
            if want_value and not packed:
                prefetch_rows(slot.grad_base, slot.grad_row[ahead], call.grad_step,
                              slot.grad_below[s + SAMPLES_AHEAD], fetched_bytes)
        if not corners[i]:
            by_weight[i] = 0
            by_location[2 * i] = 0
            by_location[2 * i + 1] = 0
            continue
        v = corner_rows(value_base, value_row[i], value_step, value_below[s], corners[i], outside,
                        slot.window_bytes if packed and want_value else 0)
        if want_dots:
            dots(v, g, slot, i, channels, &dot, &dot_x, &dot_y)
            by_weight[i] = dot
            by_location[2 * i] = weight_x[i] * dot_x
            by_location[2 * i + 1] = weight_y[i] * dot_y
        if want_value:
            if packed:
                scatter(moved_rows(v, slot.grad_base - value_base), g, slot, i, channels)
            else:
                scatter(
                    corner_rows(slot.grad_base, slot.grad_row[i], call.grad_step, slot.grad_below[s],
                                corners[i], slot.outside_grad, 0),
                    g, slot, i, channels)


cdef void backward_tile(Call call, Slot* slot, Py_ssize_t part, Py_ssize_t b, Py_ssize_t h,
                        Py_ssize_t samples, Py_ssize_t first_query, Py_ssize_t count, Py_ssize_t end,
                        real kind) noexcept nogil:
    # The queries first_query... of a chunk that goes on to `end`.
    cdef Py_ssize_t channels = call.padded_channels if call.packed else call.channels, q
    # With few registers it is no gain.
    cdef bint usual = MSDA_VECTOR_BYTES > 16 and channels == USUAL_CHANNELS and call.packed and call.want_dots \
        and call.want_value
    cdef const real* g = <const real*>slot.channels
    load_grad_output(call, slot, first_query, count, kind)
    for q in range(count):
        if first_query + q + call.tile_queries < end:
            prefetch_query(call, slot, first_query + q + call.tile_queries)
        if usual:
            # A loop of its own, from which the compiler leaves out what does not vary.
            touch_samples(call, slot, q * samples, samples, count * samples, g, USUAL_CHANNELS, True,
                          True, True, min(MOST_BYTES_OF_A_ROW, 2 * USUAL_CHANNELS * <Py_ssize_t>sizeof(real)))
        else:
            touch_samples(call, slot, q * samples, samples, count * samples, g, channels, call.packed,
                          call.want_dots, call.want_value, call.fetched_bytes)
        g += call.padded_channels
    store_sample_gradients(call, slot, part, b, h, samples, first_query, count, kind)
