# Where packed groups of rows lie: their places.
#
# Of a small map each group has a place of its own. Of a large one they take turns in a window, which stays in the caches:
# group g has the place g modulo the number of places. One that is come to sends the one there away, which may come
# back. Where many do, because queries jump about, the window is given up, and each group has its own place.

cdef enum:
    NO_GROUP = -1
    OWN_PLACES = -1         # the mask of groups that have places of their own
    # A window has room for so many lines of pixels, twice the usual offsets up and down, and is not smaller than this.
    WINDOW_LINES = 32
    SMALLEST_WINDOW = 1 << 20
    # With fewer samples for each row of the map there is less to gain, and more to lose where queries come back.
    SAMPLES_FOR_EACH_ROW = 3
    # It is given up when more groups have come back than this, and one more for so many tiles until then.
    MAY_COME_BACK = 16
    TILES_FOR_ONE_MORE = 4


cdef inline Py_ssize_t place_of(const Slot* slot, Py_ssize_t group) noexcept nogil:
    return group & slot.place_mask


cdef inline bint is_there(const Slot* slot, Py_ssize_t group) noexcept nogil:
    return slot.group_at[place_of(slot, group)] == group


cdef inline Py_ssize_t packed_at(Call call, const Slot* slot, Py_ssize_t row) noexcept nogil:
    # Where a row lies in the packed memory, in bytes. The rows of a group follow each other.
    return (row & slot.row_mask) * call.value_step


cdef Py_ssize_t window_places(Call call, Py_ssize_t part) noexcept nogil:
    # Of the part's window: a power of two. 0: it has none, since it would not be much smaller than the part, or would
    # not pay.
    cdef Py_ssize_t places = 2, rows = call.parts.rows[part, 1] - call.parts.rows[part, 0], width
    if not call.packed or call.carries_blocks() or call.parts.level_count(part) != 1 \
            or call.queries * call.points < SAMPLES_FOR_EACH_ROW * rows:
        return 0
    width = call.parts.levels[call.parts.members[call.parts.begin[part]], 1]
    while places * GROUP_ROWS * 2 <= rows:
        if places * GROUP_ROWS // WINDOW_LINES >= width and places * GROUP_ROWS * call.value_step >= SMALLEST_WINDOW:
            return places
        places *= 2
    return 0


cdef inline Py_ssize_t rows_to_the_last_corner(Call call, Py_ssize_t part) noexcept nogil:
    # From the row of a sample's corner 00 in a window, both included.
    return call.parts.levels[call.parts.members[call.parts.begin[part]], 1] + 2


cdef void copy_behind_the_end(Call call, Slot* slot, const Unit* unit, Py_ssize_t group) noexcept nogil:
    # Rows of the window's beginning, for samples at its end. There is room: a window is half of the part or less.
    cdef Py_ssize_t first = packed_at(call, slot, group * GROUP_ROWS)
    cdef Py_ssize_t size = min(GROUP_ROWS * call.value_step,
                               (rows_to_the_last_corner(call, unit.part) - 1) * call.value_step - first)
    if slot.place_mask != OWN_PLACES and size > 0:
        memcpy(slot.packed + slot.window_bytes + first, slot.packed + first, size)


cdef void give_places(Call call, Slot* slot, Py_ssize_t groups, Py_ssize_t places) noexcept nogil:
    # To the unit's groups, none of which is there yet. 0: to each its own.
    cdef Py_ssize_t place
    slot.place_mask = places - 1
    slot.row_mask = places * GROUP_ROWS - 1
    slot.window_bytes = places * GROUP_ROWS * call.value_step
    slot.tiles_in_hand = MAY_COME_BACK * TILES_FOR_ONE_MORE
    slot.unpacked = groups
    memset(slot.has_left, 0, groups)
    for place in range(places if places else groups):
        slot.group_at[place] = NO_GROUP


cdef inline void forget_ready(Call call, Slot* slot, Py_ssize_t part) noexcept nogil:
    # No group is known to be ready.
    cdef Py_ssize_t k
    for k in range(call.parts.level_count(part)):
        slot.first_group[k], slot.last_group[k] = 0, -1


cdef void send_away(Call call, Slot* slot, const Unit* unit, Py_ssize_t group) noexcept nogil:
    if call.want_value and slot.block_of_group[group] != NOBODYS:
        park_group(call, slot, unit, group)
    slot.group_at[place_of(slot, group)] = NO_GROUP
    slot.has_left[group] = 1
    slot.unpacked += 1
    # A window belongs to one level. The groups known to be ready are neighbours, at most as many as there are places:
    # the one that comes is a neighbour of theirs, so the one that leaves is the first of them or the last, or none.
    if group == slot.first_group[0]:
        slot.first_group[0] += 1
    elif group == slot.last_group[0]:
        slot.last_group[0] -= 1


cdef void give_up_window(Call call, Slot* slot, const Unit* unit, bint calling_thread) noexcept nogil:
    cdef Py_ssize_t place, group
    for place in range(slot.place_mask + 1):
        group = slot.group_at[place]
        if group != NO_GROUP:
            if not go_on(call, slot, calling_thread, GROUP_ROWS * call.channels):
                return
            send_away(call, slot, unit, group)
    give_places(call, slot, row_groups(unit.rows), 0)
    forget_ready(call, slot, unit.part)
