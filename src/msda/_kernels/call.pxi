# One call: its arrays, how it is cut into work items, and the scratch memory that its threads use.
#
# The work of a call is cut into units (batch, head, part of the levels), and each unit into chunks of queries. A
# backward pass with a gradient of value has the query blocks of the definition as its chunks. plan.py chooses.

# No machine has so much memory: a size beyond is one that only a broadcast array can have.
_MOST_BYTES = 2**50

cdef enum:
    # Samples that are worked out together before their rows are touched: their records stay in the first-level
    # cache.
    TILE_SAMPLES = 256
    CACHE_LINE = 64         # as in api.py


# A unit of the work.
cdef struct Unit:
    Py_ssize_t number
    Py_ssize_t part
    Py_ssize_t b
    Py_ssize_t h
    Py_ssize_t rows         # of value, that the part owns


# What a unit has of one of the caller's arrays: for each query a few elements, near each other mostly.
cdef struct PerQuery:
    char* first             # the first element of query 0
    Py_ssize_t step         # bytes from a query to the next
    Py_ssize_t extent       # bytes from the first element to the last; less than 0: they are not fetched ahead


cdef extern from "process.h" nogil:
    ctypedef struct msda_fp_mode:
        pass


# What a thread works with: pointers into its slice of the scratch memory. void* stands for real*.
cdef struct Slot:
    Py_ssize_t levels_part  # the part that the levels below are those of; -1: none yet
    # for each sample (level, point) of a query, and the first ones of the next
    Py_ssize_t* value_below # bytes from a row of its level's map to that of the pixel below
    Py_ssize_t* grad_below
    # for each sample of a tile of queries: its level
    double* width           # NaN where the level has no pixels
    double* height
    double* first_row
    void* width_rounded
    void* height_rounded
    #   its geometry
    double* location        # (x, y), normalised
    double* row             # of the corner 00, counted from the unit's first row
    int64_t* corners        # which corners lie in the map, CORNER_00 | ...; none: the sample does not count
    int64_t* value_row      # byte offset of the row of the corner 00, in it or not
    int64_t* grad_row       # that of its gradient, where rows are not packed
    void* dx
    void* dy
    #   its weights
    void* weight            # the attention weight
    void* weight_x          #   times the level's width
    void* weight_y          #   times the level's height
    void* corner_weight[4]  #   times the corner's share
    #   its results
    void* by_weight
    void* by_location
    # for each query of a tile: the head's channels of grad_output or of the output
    void* channels
    # one row each
    void* level_sum
    char* outside_value     # stand in for the rows outside the map: zeros, and what nobody reads
    char* outside_grad
    # the head's rows, where they are packed
    const char* callers_value # where the first of them lies in the caller's array
    char* packed
    Py_ssize_t packed_unit  # whose they are
    #   in groups, which lie in places: each in its own, or all in turn in those of a window
    Py_ssize_t* group_at    # for each place: the group that is there
    Py_ssize_t unpacked     # groups that are nowhere
    Py_ssize_t place_mask   # group & place_mask: its place
    Py_ssize_t row_mask     # row & row_mask: the row's, in rows
    Py_ssize_t window_bytes # where rows go on at the beginning; 0: nowhere
    uint8_t* has_left       # for each group: whether it has been sent away
    Py_ssize_t tiles_in_hand # each group that comes back costs some; less than 0: the window does not pay
    int64_t* block_of_group # for each group of rows: the block whose sums it holds
    char* parked            # the sums of groups that were sent away, row by row
    Py_ssize_t parked_step
    bint parked_in_place    # in the caller's array
    void* earlier_blocks    # the sums of the blocks before that one,
    uint8_t* in_earlier     #   for which groups there are some
    double* lowest_row      # for each sample of a query: which rows it touches in this tile
    double* highest_row
    Py_ssize_t* first_group # for each level of the part, the first and the last of the groups known to be ready
    Py_ssize_t* last_group
    # where the unit's elements lie in the caller's arrays
    PerQuery locations
    PerQuery weights
    PerQuery grad_output
    PerQuery output
    PerQuery grad_locations
    PerQuery grad_weights
    msda_fp_mode callers_mode # floating-point mode of the thread outside of an item
    bint levels_run_on      # whether the levels of the part are neighbours
    # where row 0 of the unit lies: packed or in the caller's arrays
    char* value_base
    char* grad_base


cdef char* take(char** cursor, Py_ssize_t size) noexcept nogil:
    # The next size bytes of scratch memory, from a cache line on.
    cdef char* start = cursor[0]
    cursor[0] = start + (size + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    return start


@cython.final
@cython.auto_pickle(False)  # it holds borrowed memory
cdef class Call:
    """One forward or backward pass, checked and planned: see msda.plan for what `plan` holds."""

    cdef Array value                                        # batch, key, head, channel
    cdef Array locations                                    # batch, query, head, level, point, (x, y)
    cdef Array weights                                      # batch, query, head, level, point
    cdef Array grad_output                                  # batch, query, head, channel
    cdef Array output
    cdef Array grad_value
    cdef Array grad_locations
    cdef Array grad_weights
    cdef Parts parts

    cdef Py_ssize_t batch, keys, heads, channels, queries, points
    cdef bint is_double, forward_pass, want_value, want_locations, want_weights, want_dots
    cdef bint output_in_lines                                 # written past the caches
    cdef bint locations_run_on, weights_run_on, grad_locations_run_on, grad_weights_run_on

    cdef Py_ssize_t threads, chunks
    cdef bint chunks_apart, packed, clear_grad_value

    cdef Py_ssize_t real_size, padded_channels, row_bytes
    cdef Py_ssize_t most_samples, tile_queries
    cdef Py_ssize_t value_step, grad_step                     # bytes from a row of the unit to the next
    cdef Py_ssize_t fetched_bytes                             # of a row, ahead of its use; 0: none
    cdef Py_ssize_t slot_bytes

    cdef Slot* slots
    cdef void* carried_blocks                                 # of the unit that a round of blocks ended in
    cdef msda_fp_mode callers_mode                            # at the beginning, or what signal handlers left
    cdef Progress progress

    def __cinit__(self, plan, value, locations, weights, grad_output=None, output=None, grad_value=None,
                  grad_locations=None, grad_weights=None):
        cdef Py_ssize_t rows
        borrow(value, &self.value, 0)
        borrow(locations, &self.locations, 0)
        borrow(weights, &self.weights, 0)
        self.batch, self.keys = self.value.shape[0], self.value.shape[1]
        self.heads, self.channels = self.value.shape[2], self.value.shape[3]
        self.queries = self.locations.shape[1]
        self.points = self.locations.shape[4] if self.queries else 0
        self.locations_run_on = runs_on(&self.locations, 3, 5)
        self.weights_run_on = runs_on(&self.weights, 3, 4)
        self.is_double = plan.is_double
        self.real_size = 8 if self.is_double else 4
        self.forward_pass = output is not None
        self.want_value = grad_value is not None
        self.want_locations = grad_locations is not None
        self.want_weights = grad_weights is not None
        self.want_dots = self.want_locations or self.want_weights
        if self.forward_pass:
            borrow(output, &self.output, PyBUF_WRITABLE)
            self.output_in_lines = in_lines(&self.output, self.real_size)
        else:
            borrow(grad_output, &self.grad_output, 0)
        if self.want_value:
            borrow(grad_value, &self.grad_value, PyBUF_WRITABLE)
        if self.want_locations:
            borrow(grad_locations, &self.grad_locations, PyBUF_WRITABLE)
            self.grad_locations_run_on = runs_on(&self.grad_locations, 3, 5)
        if self.want_weights:
            borrow(grad_weights, &self.grad_weights, PyBUF_WRITABLE)
            self.grad_weights_run_on = runs_on(&self.grad_weights, 3, 4)

        self.threads = plan.threads
        self.chunks = plan.chunks
        self.chunks_apart = plan.chunks_apart
        self.packed = plan.packed
        self.clear_grad_value = plan.clear_grad_value
        self.parts = plan.parts

        self.most_samples = self.parts.most_levels * self.points
        rows = self.parts.most_rows if self.packed else 0
        if (<object>rows + TILE_SAMPLES) * self.channels * 16 > _MOST_BYTES \
                or self.most_samples > _MOST_BYTES // 1024:
            raise MemoryError(
                f"scratch memory for {rows} packed keys of {self.channels} channels, "
                f"{self.most_samples} samples a query")
        self.tile_queries = max(1, min(self.queries, TILE_SAMPLES // max(1, self.most_samples)))
        self.padded_channels = (self.channels * self.real_size + MSDA_VECTOR_BYTES - 1) \
            // MSDA_VECTOR_BYTES * MSDA_VECTOR_BYTES // self.real_size
        self.row_bytes = self.padded_channels * self.real_size
        if self.packed:
            # A row of value and that of its gradient beside each other: one address, neighbouring lines.
            self.value_step = self.row_bytes * (self.reads_value() + self.want_value)
            self.grad_step = self.value_step
        elif self.keys > 1 and self.channels > 0:
            # An axis of one row may have any stride, and rows without channels too.
            self.value_step = self.value.strides[1]
            self.grad_step = self.grad_value.strides[1] if self.want_value else 0
        if self.parts.most_rows * abs(self.value_step) > FITS_THE_CACHE:
            self.fetched_bytes = min(self.value_step if self.packed else self.row_bytes, MOST_BYTES_OF_A_ROW)
        self.slot_bytes = <Py_ssize_t>self.lay_out(NULL, NULL)

    def __dealloc__(self):
        PyBuffer_Release(&self.value.lent)
        PyBuffer_Release(&self.locations.lent)
        PyBuffer_Release(&self.weights.lent)
        PyBuffer_Release(&self.grad_output.lent)
        PyBuffer_Release(&self.output.lent)
        PyBuffer_Release(&self.grad_value.lent)
        PyBuffer_Release(&self.grad_locations.lent)
        PyBuffer_Release(&self.grad_weights.lent)

    @property
    def scratch_bytes(self):
        """Bytes of scratch memory that run() needs, at any alignment."""
        cdef Py_ssize_t shared = self.parts.most_rows * self.row_bytes if self.carries_blocks() else 0
        return self.threads * (self.slot_bytes + <Py_ssize_t>sizeof(Slot)) + shared + 3 * CACHE_LINE

    @property
    def windows(self):
        """For each part how many groups of packed rows have room at a time; 0: all that it has."""
        return [window_places(self, part) for part in range(self.parts.count)]

    cdef Py_ssize_t units(self) noexcept nogil:
        return self.batch * self.heads * self.parts.count

    cdef Unit unit_of(self, Py_ssize_t number) noexcept nogil:
        cdef Unit unit
        unit.number = number
        unit.part = number % self.parts.count
        unit.h = number // self.parts.count % self.heads
        unit.b = number // self.parts.count // self.heads
        unit.rows = self.parts.rows[unit.part, 1] - self.parts.rows[unit.part, 0]
        return unit

    cdef bint reads_value(self) noexcept nogil:
        return self.forward_pass or self.want_dots

    cdef bint adds_blocks(self) noexcept nogil:
        return self.want_value and self.chunks > 1

    cdef bint carries_blocks(self) noexcept nogil:
        return self.adds_blocks() and self.chunks_apart

    cdef bint has_windows(self) noexcept nogil:
        cdef Py_ssize_t part
        for part in range(self.parts.count):
            if window_places(self, part) > 0:
                return True
        return False

    cdef char* lay_out(self, Slot* slot, char* base) noexcept nogil:
        # Points the slot into the memory from base on; gives its end. A NULL slot: only measures.
        cdef Slot unused
        cdef char* cursor = base
        cdef Py_ssize_t per_query = self.most_samples
        cdef Py_ssize_t per_tile = \
            (self.most_samples * self.tile_queries + MSDA_PLACED - 1) // MSDA_PLACED * MSDA_PLACED
        cdef Py_ssize_t reals = per_tile * self.real_size
        cdef Py_ssize_t groups = row_groups(self.parts.most_rows)
        cdef int corner
        if slot == NULL:
            slot = &unused
        slot.value_below = <Py_ssize_t*>take(&cursor, 8 * (per_query + SAMPLES_AHEAD))
        slot.grad_below = <Py_ssize_t*>take(&cursor, 8 * (per_query + SAMPLES_AHEAD))
        slot.width = <double*>take(&cursor, 8 * per_tile)
        slot.height = <double*>take(&cursor, 8 * per_tile)
        slot.first_row = <double*>take(&cursor, 8 * per_tile)
        slot.width_rounded = take(&cursor, reals)
        slot.height_rounded = take(&cursor, reals)
        slot.location = <double*>take(&cursor, 16 * per_tile)
        slot.row = <double*>take(&cursor, 8 * (per_tile + MSDA_PLACED))
        slot.corners = <int64_t*>take(&cursor, 8 * per_tile)
        slot.value_row = <int64_t*>take(&cursor, 8 * per_tile)
        if not self.packed: # else they lie beside those of value
            slot.grad_row = <int64_t*>take(&cursor, 8 * per_tile)
        slot.dx = take(&cursor, reals)
        slot.dy = take(&cursor, reals)
        slot.weight = take(&cursor, reals)
        slot.weight_x = take(&cursor, reals)
        slot.weight_y = take(&cursor, reals)
        for corner in range(4):
            slot.corner_weight[corner] = take(&cursor, reals)
        slot.by_weight = take(&cursor, reals)
        slot.by_location = take(&cursor, 2 * reals)
        slot.channels = take(&cursor, self.row_bytes * self.tile_queries)
        slot.level_sum = take(&cursor, self.row_bytes)
        # At the distance of packed rows from those of their gradient.
        slot.outside_value = take(&cursor, 2 * self.row_bytes)
        slot.outside_grad = slot.outside_value + self.row_bytes
        slot.packed = cursor
        slot.earlier_blocks = cursor
        if self.packed:
            slot.packed = take(&cursor, self.value_step * self.parts.most_rows)
            slot.group_at = <Py_ssize_t*>take(&cursor, 8 * groups)
            slot.has_left = <uint8_t*>take(&cursor, groups)
            # msda_find_range reads and writes MSDA_PLACED of them, from any sample on.
            slot.lowest_row = <double*>take(&cursor, 8 * (per_query + MSDA_PLACED))
            slot.highest_row = <double*>take(&cursor, 8 * (per_query + MSDA_PLACED))
            slot.first_group = <Py_ssize_t*>take(&cursor, 8 * self.parts.most_levels)
            slot.last_group = <Py_ssize_t*>take(&cursor, 8 * self.parts.most_levels)
            if self.want_value:
                slot.block_of_group = <int64_t*>take(&cursor, 8 * groups)
                slot.in_earlier = <uint8_t*>take(&cursor, groups)
                if self.adds_blocks() and not self.chunks_apart:
                    slot.earlier_blocks = take(&cursor, self.row_bytes * self.parts.most_rows)
                slot.parked_in_place = can_park(self)
                slot.parked_step = self.grad_value.strides[1] if slot.parked_in_place else self.row_bytes
                if not slot.parked_in_place and self.has_windows():
                    slot.parked = take(&cursor, self.row_bytes * self.parts.most_rows)
        slot.levels_part = -1
        slot.packed_unit = -1
        slot.value_base = NULL
        slot.grad_base = NULL
        return cursor

    def run(self, scratch):
        """Computes into the arrays given, with scratch_bytes of scratch memory; gives the size of the team."""
        cdef Py_buffer lent
        PyObject_GetBuffer(scratch, &lent, PyBUF_WRITABLE)
        try:
            if lent.len < self.scratch_bytes:
                raise ValueError(f"scratch: {lent.len} bytes, expected {self.scratch_bytes}")
            self.run_in(<char*>lent.buf)
        finally:
            PyBuffer_Release(&lent)
        return self.progress.team

    cdef int run_in(self, char* scratch) except -1:
        cdef char* cursor = scratch + -<uintptr_t>scratch % CACHE_LINE
        cdef Py_ssize_t i
        self.slots = <Slot*>take(&cursor, self.threads * sizeof(Slot))
        for i in range(self.threads):
            cursor = self.lay_out(&self.slots[i], cursor)
        self.carried_blocks = cursor
        begin_watch(self)
        with nogil:
            if self.is_double:
                run_items(self, <double>0)
            else:
                run_items(self, <float>0)
        return end_watch(self)
