# The output: for each query and head, the sum over levels of the sums over their points of weight * sample.

cdef extern from "rows.h" nogil:
    int MSDA_VECTOR_BYTES
    void msda_add_sample_f32(float* sum, const float* v00, const float* v01, const float* v10, const float* v11,
                             float dx, float dy, float weight, Py_ssize_t n)
    void msda_add_sample_f64(double* sum, const double* v00, const double* v01, const double* v10,
                             const double* v11, double dx, double dy, double weight, Py_ssize_t n)


cdef inline void add_sample(real* sum, Rows v, Slot* slot, Py_ssize_t i, Py_ssize_t channels) noexcept nogil:
    # sum += weight * sample i of the tile
    if real is float:
        msda_add_sample_f32(
            sum, <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10, <real*>v.corner_11,
            (<real*>slot.dx)[i], (<real*>slot.dy)[i], (<real*>slot.weight)[i], channels)
    else:
        msda_add_sample_f64(
            sum, <real*>v.corner_00, <real*>v.corner_01, <real*>v.corner_10, <real*>v.corner_11,
            (<real*>slot.dx)[i], (<real*>slot.dy)[i], (<real*>slot.weight)[i], channels)


cdef void forward_tile(Call call, Slot* slot, Py_ssize_t b, Py_ssize_t h, Py_ssize_t samples,
                       Py_ssize_t first_query, Py_ssize_t count, real kind) noexcept nogil:
    cdef Py_ssize_t row_channels = call.padded_channels if call.packed else call.channels
    cdef real* level_sum = <real*>slot.level_sum
    cdef real* output = <real*>slot.channels
    cdef Py_ssize_t q, s, point, channel, i = 0
    for q in range(count):
        memset(output, 0, call.row_bytes)
        s = 0
        while s < samples:
            memset(level_sum, 0, call.row_bytes)
            for point in range(call.points):
                if slot.corners[i]:
                    add_sample(
                        level_sum,
                        corner_rows(slot.value_base, slot.value_row[i], call.value_step, slot.value_below[s],
                                    slot.corners[i], slot.outside_value),
                        slot, i, row_channels)
                i += 1
                s += 1
            for channel in range(call.padded_channels):
                output[channel] = output[channel] + level_sum[channel]
        if call.channels > 0:
            store_strip(<const real*>output, call.channels, call.output_code,
                        <char*>&call.output[b, first_query + q, h, 0, 0], call.output.strides[3])
