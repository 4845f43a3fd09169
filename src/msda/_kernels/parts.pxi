# The levels of a call, and how they are parted: read from Python once, for all calls of the same plan.

@cython.final
cdef class Parts:
    """The levels, in parts that share no row of value: see msda.plan."""

    cdef object tables
    cdef const int64_t[:, ::1] levels       # height, width, first key
    cdef const int64_t[::1] members         # part p has the levels (ascending)
    cdef const int64_t[::1] begin           #   members[begin[p]:begin[p + 1]]
    cdef const int64_t[:, ::1] rows         # and owns the rows of value from, to
    cdef readonly Py_ssize_t count
    cdef Py_ssize_t most_levels, most_rows

    def __cinit__(self, levels, members, begin, rows):
        cdef Py_ssize_t part
        self.tables = levels, members, begin, rows
        self.levels, self.members, self.begin, self.rows = self.tables
        self.count = self.rows.shape[0]
        for part in range(self.count):
            self.most_levels = max(self.most_levels, self.level_count(part))
            self.most_rows = max(self.most_rows, self.rows[part, 1] - self.rows[part, 0])

    def __reduce__(self):
        return Parts, self.tables

    @property
    def level_counts(self):
        """How many levels each part has."""
        return [self.level_count(part) for part in range(self.count)]

    cdef inline Py_ssize_t level_count(self, Py_ssize_t part) noexcept nogil:
        return self.begin[part + 1] - self.begin[part]
