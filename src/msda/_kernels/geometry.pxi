# Where samples lie: positions, the gate, corners and weights (docs/numerics.md, "Positions").
#
# All samples of a tile of queries are worked out before any row is touched: these loops have no branches and are
# vectorised, and the row loops then find everything ready.


cdef void set_levels(Call call, Slot* slot, Py_ssize_t part, real kind) noexcept nogil:
    # Spreads what is known of the part's levels over the samples of a query.
    cdef Py_ssize_t i, level, point, sample = 0
    cdef int64_t height, width
    for i in range(call.part_begin[part], call.part_begin[part + 1]):
        level = call.part_levels[i]
        height, width = call.levels[level, 0], call.levels[level, 1]
        for point in range(call.points):
            slot.rows[sample] = height
            slot.columns[sample] = width
            slot.first_row[sample] = call.levels[level, 2] - call.part_rows[part, 0]
            # No position is inside a level without pixels: every comparison with NaN is false.
            slot.height[sample] = <double>height if height > 0 and width > 0 else NAN
            slot.width[sample] = <double>width if height > 0 and width > 0 else NAN
            (<real*>slot.height_rounded)[sample] = <real>height
            (<real*>slot.width_rounded)[sample] = <real>width
            sample += 1


cdef void load_samples(Call call, Slot* slot, Py_ssize_t part, Py_ssize_t b, Py_ssize_t h,
                       Py_ssize_t first_query, Py_ssize_t count, real kind) noexcept nogil:
    # The tile's locations, in float64 whatever their format, and its attention weights. Each is read once.
    cdef Py_ssize_t first = call.part_begin[part], last = call.part_begin[part + 1]
    cdef Py_ssize_t samples = (last - first) * call.points
    cdef Py_ssize_t q, i, level, point
    cdef double* location = slot.location
    cdef real* weight = <real*>slot.weight
    cdef bint together = call.part_levels[last - 1] - call.part_levels[first] == last - first - 1
    for q in range(first_query, first_query + count):
        if together and call.locations_run_on:
            load_strip(<const char*>&call.locations[b, q, h, call.part_levels[first], 0, 0, 0],
                       call.locations.strides[5], 2 * samples, call.locations_code, location)
        else:
            for i in range(first, last):
                level = call.part_levels[i]
                for point in range(call.points):
                    load_strip(<const char*>&call.locations[b, q, h, level, point, 0, 0],
                               call.locations.strides[5], 2, call.locations_code,
                               location + 2 * ((i - first) * call.points + point))
        if together and call.weights_run_on:
            load_strip(<const char*>&call.weights[b, q, h, call.part_levels[first], 0, 0],
                       call.weights.strides[4], samples, call.weights_code, weight)
        else:
            for i in range(first, last):
                load_strip(<const char*>&call.weights[b, q, h, call.part_levels[i], 0, 0],
                           call.weights.strides[4], call.points, call.weights_code,
                           weight + (i - first) * call.points)
        location += 2 * samples
        weight += samples


cdef void place_samples(Call call, Slot* slot, Py_ssize_t samples, Py_ssize_t count,
                        real kind) noexcept nogil:
    # From locations to corners, for `count` queries of `samples` samples each.
    cdef real* dx = <real*>slot.dx
    cdef real* dy = <real*>slot.dy
    cdef real* weight = <real*>slot.weight
    cdef real* weight_x = <real*>slot.weight_x
    cdef real* weight_y = <real*>slot.weight_y
    cdef real* w00 = <real*>slot.corner_weight[0]
    cdef real* w01 = <real*>slot.corner_weight[1]
    cdef real* w10 = <real*>slot.corner_weight[2]
    cdef real* w11 = <real*>slot.corner_weight[3]
    cdef const real* width_rounded = <real*>slot.width_rounded
    cdef const real* height_rounded = <real*>slot.height_rounded
    cdef Py_ssize_t q, s, i
    cdef double x, y, x0, y0
    cdef int64_t column, row, key
    cdef bint counts, left, right, top, bottom
    cdef real one = 1       # a literal would be a double, and its differences would be rounded twice
    # A corner outside the map is sent to a row of its own.
    cdef int64_t outside_value = <int64_t>(<char*>slot.outside_value - slot.value_base)
    cdef int64_t outside_grad = <int64_t>(<char*>slot.outside_grad - slot.grad_base)
    cdef Py_ssize_t value_step = call.value_step, grad_step = call.grad_step
    for q in range(count):
        for s in range(samples):
            i = q * samples + s
            x = slot.location[2 * i] * slot.width[s] - 0.5
            y = slot.location[2 * i + 1] * slot.height[s] - 0.5
            counts = (x > -1.0) & (x < slot.width[s]) & (y > -1.0) & (y < slot.height[s])
            x = x if counts else 0.0
            y = y if counts else 0.0
            x0 = floor(x)
            y0 = floor(y)
            dx[i] = <real>(x - x0)
            dy[i] = <real>(y - y0)
            column = <int64_t>x0
            row = <int64_t>y0
            left = column >= 0
            right = column + 1 < slot.columns[s]
            top = row >= 0
            bottom = row + 1 < slot.rows[s]
            key = slot.first_row[s] + row * slot.columns[s] + column
            slot.counts[i] = counts
            slot.value_row[0][i] = key * value_step if top & left else outside_value
            slot.value_row[1][i] = (key + 1) * value_step if top & right else outside_value
            key += slot.columns[s]
            slot.value_row[2][i] = key * value_step if bottom & left else outside_value
            slot.value_row[3][i] = (key + 1) * value_step if bottom & right else outside_value
            if call.want_value:
                slot.grad_row[2][i] = key * grad_step if bottom & left else outside_grad
                slot.grad_row[3][i] = (key + 1) * grad_step if bottom & right else outside_grad
                key -= slot.columns[s]
                slot.grad_row[0][i] = key * grad_step if top & left else outside_grad
                slot.grad_row[1][i] = (key + 1) * grad_step if top & right else outside_grad
    if call.forward_pass:
        return
    for q in range(count):
        for s in range(samples):
            i = q * samples + s
            weight_x[i] = weight[i] * width_rounded[s]
            weight_y[i] = weight[i] * height_rounded[s]
    for i in range(count * samples):
        w00[i] = weight[i] * ((one - dx[i]) * (one - dy[i]))
        w01[i] = weight[i] * (dx[i] * (one - dy[i]))
        w10[i] = weight[i] * ((one - dx[i]) * dy[i])
        w11[i] = weight[i] * (dx[i] * dy[i])
