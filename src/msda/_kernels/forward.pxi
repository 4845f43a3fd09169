# The output: for each query and head, the sum over levels of the sums over their points of weight * sample.

cdef extern from "rows.h" nogil:
    int MSDA_VECTOR_BYTES
    int MSDA_BLOCK
    int MSDA_SMALL_BLOCK
    ctypedef struct msda_block_f32:
        pass
    ctypedef struct msda_block_f64:
        pass
    void msda_clear_block_f32(msda_block_f32* sum, Py_ssize_t n)
    void msda_clear_block_f64(msda_block_f64* sum, Py_ssize_t n)
    void msda_add_block_f32(msda_block_f32* sum, const msda_block_f32* other, Py_ssize_t n)
    void msda_add_block_f64(msda_block_f64* sum, const msda_block_f64* other, Py_ssize_t n)
    void msda_store_block_f32(float* to, const msda_block_f32* sum, Py_ssize_t n)
    void msda_store_block_f64(double* to, const msda_block_f64* sum, Py_ssize_t n)
    void msda_add_sample_to_block_f32(msda_block_f32* sum, const float* v00, const float* v01, const float* v10,
                                      const float* v11, float dx, float dy, float weight, Py_ssize_t n)
    void msda_add_sample_to_block_f64(msda_block_f64* sum, const double* v00, const double* v01,
                                      const double* v10, const double* v11, double dx, double dy, double weight,
                                      Py_ssize_t n)
    void msda_add_sample_f32(float* sum, const float* v00, const float* v01, const float* v10, const float* v11,
                             float dx, float dy, float weight, Py_ssize_t n)
    void msda_add_sample_f64(double* sum, const double* v00, const double* v01, const double* v10,
                             const double* v11, double dx, double dy, double weight, Py_ssize_t n)


cdef inline void sum_block(Call call, const Slot* slot, Py_ssize_t i, Py_ssize_t samples, Py_ssize_t last,
                           Py_ssize_t channel, Py_ssize_t n, real* output) noexcept nogil:
    # The samples of one query, which are those from i on of the tile of `last` samples: n channels of its output.
    cdef msda_block_f32 total_f32, level_f32
    cdef msda_block_f64 total_f64, level_f64
    cdef const real* dx = <const real*>slot.dx
    cdef const real* dy = <const real*>slot.dy
    cdef const real* weight = <const real*>slot.weight
    cdef const int64_t* corners = slot.corners
    cdef const int64_t* value_row = slot.value_row
    cdef const Py_ssize_t* value_below = slot.value_below
    cdef char* base = slot.value_base + channel * call.real_size
    cdef char* outside = slot.outside_value + channel * call.real_size
    cdef Py_ssize_t step = call.value_step, points = call.points, s = 0, end_of_level
    # A row's first block fetches all of it.
    cdef Py_ssize_t fetched_bytes = call.fetched_bytes if channel == 0 else 0
    cdef Rows v
    if real is float:
        msda_clear_block_f32(&total_f32, n)
    else:
        msda_clear_block_f64(&total_f64, n)
    while s < samples:
        end_of_level = s + points
        if real is float:
            msda_clear_block_f32(&level_f32, n)
        else:
            msda_clear_block_f64(&level_f64, n)
        while s < end_of_level:
            if fetched_bytes > 0 and i + SAMPLES_AHEAD < last and corners[i + SAMPLES_AHEAD] == ALL_CORNERS:
                prefetch_rows(base, value_row[i + SAMPLES_AHEAD], step, value_below[s + SAMPLES_AHEAD], fetched_bytes)
            if corners[i]:
                v = corner_rows(base, value_row[i], step, value_below[s], corners[i], outside, 0)
                if real is float:
                    msda_add_sample_to_block_f32(
                        &level_f32, <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10,
                        <real*>v.corner_11, dx[i], dy[i], weight[i], n)
                else:
                    msda_add_sample_to_block_f64(
                        &level_f64, <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10,
                        <real*>v.corner_11, dx[i], dy[i], weight[i], n)
            i += 1
            s += 1
        if real is float:
            msda_add_block_f32(&total_f32, &level_f32, n)
        else:
            msda_add_block_f64(&total_f64, &level_f64, n)
    if real is float:
        msda_store_block_f32(output + channel, &total_f32, n)
    else:
        msda_store_block_f64(output + channel, &total_f64, n)


cdef void sum_rest(Call call, const Slot* slot, Py_ssize_t i, Py_ssize_t samples, Py_ssize_t channel,
                   Py_ssize_t count, real* output) noexcept nogil:
    # The same for the last `count` channels, which do not make a block.
    cdef real* level_sum = <real*>slot.level_sum
    cdef const real* dx = <const real*>slot.dx
    cdef const real* dy = <const real*>slot.dy
    cdef const real* weight = <const real*>slot.weight
    cdef Py_ssize_t s = 0, c, end_of_level
    cdef Rows v
    memset(output + channel, 0, count * sizeof(real))
    while s < samples:
        end_of_level = s + call.points
        memset(level_sum, 0, count * sizeof(real))
        while s < end_of_level:
            if slot.corners[i]:
                v = corner_rows(slot.value_base + channel * call.real_size, slot.value_row[i], call.value_step,
                                slot.value_below[s], slot.corners[i],
                                slot.outside_value + channel * call.real_size, 0)
                if real is float:
                    msda_add_sample_f32(
                        level_sum, <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10,
                        <real*>v.corner_11, dx[i], dy[i], weight[i], count)
                else:
                    msda_add_sample_f64(
                        level_sum, <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10,
                        <real*>v.corner_11, dx[i], dy[i], weight[i], count)
            i += 1
            s += 1
        for c in range(count):
            output[channel + c] = output[channel + c] + level_sum[c]


cdef void forward_tile(Call call, Slot* slot, Py_ssize_t samples, Py_ssize_t first_query, Py_ssize_t count,
                       Py_ssize_t end, real kind) noexcept nogil:
    # The queries first_query... of a chunk that goes on to `end`.
    cdef Py_ssize_t row_channels = call.padded_channels if call.packed else call.channels
    cdef real* output = <real*>slot.channels
    cdef Py_ssize_t q, channel
    if call.channels == 0:
        return
    for q in range(count):
        if samples > 0 and first_query + q + call.tile_queries < end:
            prefetch_query(call, slot, first_query + q + call.tile_queries)
        channel = 0
        while channel + MSDA_BLOCK <= row_channels:
            sum_block(call, slot, q * samples, samples, count * samples, channel, MSDA_BLOCK, output)
            channel += MSDA_BLOCK
        while channel + MSDA_SMALL_BLOCK <= row_channels:
            if channel + 2 * MSDA_SMALL_BLOCK <= row_channels:
                sum_block(call, slot, q * samples, samples, count * samples, channel, 2 * MSDA_SMALL_BLOCK, output)
                channel += 2 * MSDA_SMALL_BLOCK
            else:
                sum_block(call, slot, q * samples, samples, count * samples, channel, MSDA_SMALL_BLOCK, output)
                channel += MSDA_SMALL_BLOCK
        if channel < row_channels:
            sum_rest(call, slot, q * samples, samples, channel, row_channels - channel, output)
        if call.output_in_lines:
            msda_write_lines(of_query(&slot.output, first_query + q), <const char*>output, call.row_bytes)
        else:
            store_strip(<const real*>output, call.channels, call.output.code, of_query(&slot.output, first_query + q),
                        call.output.strides[3])
