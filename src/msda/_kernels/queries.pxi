# What a unit has of the caller's arrays for each query: found once, then read, written and fetched ahead query by
# query.

cdef PerQuery per_query(const char* first, Py_ssize_t extent, Py_ssize_t step, Py_ssize_t queries) noexcept nogil:
    cdef PerQuery found
    cdef Py_ssize_t size = step * (queries - 1)
    found.first = <char*>first
    found.step = step
    found.extent = extent
    if -FITS_THE_CACHE < size < FITS_THE_CACHE:
        found.extent = -1
    return found


cdef PerQuery channels_of(Call call, const Array* array, const Unit* unit) noexcept nogil:
    return per_query(head_of(array, unit.b, 0, unit.h), (call.channels - 1) * array.strides[3], array.strides[1],
                     call.queries)


cdef PerQuery samples_of(Call call, const Array* array, const Unit* unit, Py_ssize_t extent_of_one) noexcept nogil:
    # From the first level of the part to the last. A sample extends so many bytes from its first element to its last:
    # from x to y, or none.
    cdef Py_ssize_t first = call.parts.members[call.parts.begin[unit.part]]
    cdef Py_ssize_t last = call.parts.members[call.parts.begin[unit.part + 1] - 1]
    cdef const char* begin = sample_of(array, unit.b, 0, unit.h, first, 0)
    cdef const char* end = sample_of(array, unit.b, 0, unit.h, last, call.points - 1)
    return per_query(begin, end - begin + extent_of_one, array.strides[1], call.queries)


cdef void find_queries(Call call, Slot* slot, const Unit* unit) noexcept nogil:
    cdef Py_ssize_t begin = call.parts.begin[unit.part], levels = call.parts.level_count(unit.part)
    cdef PerQuery none = per_query(NULL, 0, 0, 0)
    slot.locations = slot.weights = slot.grad_locations = slot.grad_weights = none
    slot.output = slot.grad_output = none
    if call.queries == 0:
        return
    if levels * call.points > 0:
        slot.levels_run_on = call.parts.members[begin + levels - 1] - call.parts.members[begin] == levels - 1
        slot.locations = samples_of(call, &call.locations, unit, call.locations.strides[5])
        slot.weights = samples_of(call, &call.weights, unit, 0)
        if call.want_locations:
            slot.grad_locations = samples_of(call, &call.grad_locations, unit, call.grad_locations.strides[5])
        if call.want_weights:
            slot.grad_weights = samples_of(call, &call.grad_weights, unit, 0)
    if call.channels > 0:
        if call.forward_pass:
            slot.output = channels_of(call, &call.output, unit)
            if call.output_in_lines:
                slot.output.extent = -1
        else:
            slot.grad_output = channels_of(call, &call.grad_output, unit)


cdef inline char* of_query(const PerQuery* elements, Py_ssize_t q) noexcept nogil:
    return elements.first + q * elements.step


cdef void prefetch_query(Call call, const Slot* slot, Py_ssize_t q) noexcept nogil:
    # One query's lines at a time, between the work of another: many at once would wait for each other.
    prefetch_lines(of_query(&slot.locations, q), slot.locations.extent, False)
    prefetch_lines(of_query(&slot.weights, q), slot.weights.extent, False)
    if call.forward_pass:
        prefetch_lines(of_query(&slot.output, q), slot.output.extent, True)
    else:
        prefetch_lines(of_query(&slot.grad_output, q), slot.grad_output.extent, False)
        prefetch_lines(of_query(&slot.grad_locations, q), slot.grad_locations.extent, True)
        prefetch_lines(of_query(&slot.grad_weights, q), slot.grad_weights.extent, True)


cdef void load_samples(Call call, Slot* slot, Py_ssize_t part, Py_ssize_t b, Py_ssize_t h,
                       Py_ssize_t first_query, Py_ssize_t count, real kind) noexcept nogil:
    # The tile's locations, in float64 whatever their format, and its attention weights. Each is read once.
    cdef Py_ssize_t first = call.parts.begin[part], last = call.parts.begin[part + 1]
    cdef Py_ssize_t samples = (last - first) * call.points
    cdef Py_ssize_t q, i, level, point
    cdef double* location = slot.location
    cdef real* weight = <real*>slot.weight
    for q in range(first_query, first_query + count):
        if slot.levels_run_on and call.locations_run_on:
            load_strip(of_query(&slot.locations, q), call.locations.strides[5], 2 * samples, call.locations.code,
                       location)
        else:
            for i in range(first, last):
                level = call.parts.members[i]
                for point in range(call.points):
                    load_strip(sample_of(&call.locations, b, q, h, level, point),
                               call.locations.strides[5], 2, call.locations.code,
                               location + 2 * ((i - first) * call.points + point))
        if slot.levels_run_on and call.weights_run_on:
            load_strip(of_query(&slot.weights, q), call.weights.strides[4], samples, call.weights.code, weight)
        else:
            for i in range(first, last):
                load_strip(sample_of(&call.weights, b, q, h, call.parts.members[i], 0),
                           call.weights.strides[4], call.points, call.weights.code,
                           weight + (i - first) * call.points)
        location += 2 * samples
        weight += samples


cdef void load_grad_output(Call call, Slot* slot, Py_ssize_t first_query, Py_ssize_t count,
                           real kind) noexcept nogil:
    cdef Py_ssize_t q, channel
    cdef real* g = <real*>slot.channels
    if call.channels == 0:
        return
    for q in range(first_query, first_query + count):
        load_strip(of_query(&slot.grad_output, q), call.grad_output.strides[3], call.channels,
                   call.grad_output.code, g)
        for channel in range(call.channels, call.padded_channels):
            g[channel] = 0
        g += call.padded_channels


cdef void store_sample_gradients(Call call, Slot* slot, Py_ssize_t part, Py_ssize_t b, Py_ssize_t h,
                                 Py_ssize_t samples, Py_ssize_t first_query, Py_ssize_t count,
                                 real kind) noexcept nogil:
    cdef Py_ssize_t first = call.parts.begin[part], last = call.parts.begin[part + 1]
    cdef Py_ssize_t q, i, level, point
    cdef const real* by_weight = <const real*>slot.by_weight
    cdef const real* by_location = <const real*>slot.by_location
    for q in range(first_query, first_query + count):
        if call.want_locations:
            if slot.levels_run_on and call.grad_locations_run_on:
                store_strip(by_location, 2 * samples, call.grad_locations.code, of_query(&slot.grad_locations, q),
                            call.grad_locations.strides[5])
            else:
                for i in range(first, last):
                    level = call.parts.members[i]
                    for point in range(call.points):
                        store_strip(by_location + 2 * ((i - first) * call.points + point), 2,
                                    call.grad_locations.code,
                                    <char*>sample_of(&call.grad_locations, b, q, h, level, point),
                                    call.grad_locations.strides[5])
        if call.want_weights:
            if slot.levels_run_on and call.grad_weights_run_on:
                store_strip(by_weight, samples, call.grad_weights.code, of_query(&slot.grad_weights, q),
                            call.grad_weights.strides[4])
            else:
                for i in range(first, last):
                    store_strip(by_weight + (i - first) * call.points, call.points, call.grad_weights.code,
                                <char*>sample_of(&call.grad_weights, b, q, h, call.parts.members[i], 0),
                                call.grad_weights.strides[4])
        by_location += 2 * samples
        by_weight += samples
