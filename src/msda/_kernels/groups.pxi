# Packed rows in groups, and which of them a tile of queries comes to.
#
# Neighbouring queries mostly sample neighbouring pixels: a tile touches few of the rows, and the next one almost the
# same. So a group is made ready when a tile first comes to it. Its rows are then still in the cache when they are
# touched, and what lies beyond all that a thread's queries come to is not packed at all.
#
# Of a large map the groups have no places of their own: they take turns in a window, which stays in the caches. Group g
# has the place g modulo the number of places. One that is come to sends the one there away, which may come back. Where
# many do, because queries jump about, the window is given up, and each group has its own place.

cdef enum:
    GROUP_ROWS = 64
    NO_GROUP = -1
    OWN_PLACES = -1 # the mask of groups that have places of their own
    # A window has room for so many lines of pixels, twice the usual offsets up and down, and is not smaller than this.
    WINDOW_LINES = 32
    SMALLEST_WINDOW = 1 << 20
    # As many groups may come back, at first and after so many tiles.
    MAY_COME_BACK = 16
    TILES_FOR_ONE_MORE = 4


cdef inline Py_ssize_t row_groups(Py_ssize_t rows) noexcept nogil:
    return (rows + GROUP_ROWS - 1) // GROUP_ROWS


cdef inline Py_ssize_t group_end(Py_ssize_t group, Py_ssize_t rows) noexcept nogil:
    return min(rows, (group + 1) * GROUP_ROWS)


cdef inline Py_ssize_t place_of(const Slot* slot, Py_ssize_t group) noexcept nogil:
    return group & slot.place_mask


cdef inline bint is_there(const Slot* slot, Py_ssize_t group) noexcept nogil:
    return slot.group_at[place_of(slot, group)] == group


cdef inline Py_ssize_t packed_at(Call call, const Slot* slot, Py_ssize_t row) noexcept nogil:
    # Where a row lies in the packed memory, in bytes. The rows of a group follow each other.
    return (row & slot.row_mask) * call.value_step


cdef Py_ssize_t window_places(Call call, Py_ssize_t part) noexcept nogil:
    # Of the part's window: a power of two. 0: it has none, since it would not be much smaller than the part.
    cdef Py_ssize_t places = 2, rows = call.parts.rows[part, 1] - call.parts.rows[part, 0], width
    if not call.packed or call.carries_blocks() or call.parts.level_count(part) != 1:
        return 0
    width = call.parts.levels[call.parts.members[call.parts.begin[part]], 1]
    while places * GROUP_ROWS * 2 <= rows:
        if places * GROUP_ROWS // WINDOW_LINES >= width and places * GROUP_ROWS * call.value_step >= SMALLEST_WINDOW:
            return places
        places *= 2
    return 0


cdef void give_places(Call call, Slot* slot, Py_ssize_t groups, Py_ssize_t places) noexcept nogil:
    # To the unit's groups, none of which is there yet. 0: to each its own.
    cdef Py_ssize_t place
    slot.place_mask = places - 1
    slot.row_mask = places * GROUP_ROWS - 1
    slot.window_bytes = places * GROUP_ROWS * call.value_step if places else PY_SSIZE_T_MAX
    slot.may_come_back = MAY_COME_BACK * TILES_FOR_ONE_MORE
    slot.unpacked = groups
    memset(slot.has_left, 0, groups)
    for place in range(places if places else groups):
        slot.group_at[place] = NO_GROUP


cdef void find_touched_rows(Slot* slot, Py_ssize_t samples, Py_ssize_t count) noexcept nogil:
    # For each sample of a query the lowest and the highest row of its corner 00 among the tile's `count` queries.
    cdef Py_ssize_t s = 0
    while s < samples:
        msda_find_range(slot.row + s, samples, count, slot.lowest_row + s, slot.highest_row + s)
        s += MSDA_PLACED


cdef inline void forget_ready(Call call, Slot* slot, Py_ssize_t part) noexcept nogil:
    # No group is known to be ready.
    cdef Py_ssize_t k
    for k in range(call.parts.level_count(part)):
        slot.first_group[k], slot.last_group[k] = 0, -1


cdef void send_away(Call call, Slot* slot, const Unit* unit, Py_ssize_t group, real kind) noexcept nogil:
    if call.want_value and slot.block_of_group[group] != NOBODYS:
        park_group(call, slot, unit, group, kind)
    slot.group_at[place_of(slot, group)] = NO_GROUP
    slot.has_left[group] = 1
    slot.unpacked += 1
    # A window belongs to one level. The groups known to be ready are neighbours, at most as many as there are places:
    # the one that comes is a neighbour of theirs, so the one that leaves is the first of them or the last, or none.
    if group == slot.first_group[0]:
        slot.first_group[0] += 1
    elif group == slot.last_group[0]:
        slot.last_group[0] -= 1


cdef void give_up_window(Call call, Slot* slot, const Unit* unit, bint calling_thread, real kind) noexcept nogil:
    cdef Py_ssize_t place, group
    for place in range(slot.place_mask + 1):
        group = slot.group_at[place]
        if group != NO_GROUP:
            if not go_on(call, slot, calling_thread, GROUP_ROWS * call.channels):
                return
            send_away(call, slot, unit, group, kind)
    give_places(call, slot, row_groups(unit.rows), 0)
    forget_ready(call, slot, unit.part)


cdef void make_ready(Call call, Slot* slot, const Unit* unit, Py_ssize_t group, Py_ssize_t block, bint calling_thread,
                     real kind) noexcept nogil:
    # The group's rows of value are there, and those of the gradient hold sums of this block.
    cdef Py_ssize_t other = slot.group_at[place_of(slot, group)]
    if other != group:
        if not go_on(call, slot, calling_thread, 2 * GROUP_ROWS * call.channels):
            return
        if other != NO_GROUP:
            send_away(call, slot, unit, other, kind)
        if slot.has_left[group]:
            slot.may_come_back -= TILES_FOR_ONE_MORE
        if call.reads_value():
            pack_group(call, slot, unit, group, kind)
        if call.want_value and slot.block_of_group[group] == block:
            fetch_parked(call, slot, unit, group, kind)
    if call.want_value:
        claim(call, slot, unit, group, block, calling_thread, kind)
    slot.group_at[place_of(slot, group)] = group
    slot.unpacked -= other != group


cdef void come_to_groups(Call call, Slot* slot, const Unit* unit, Py_ssize_t samples, Py_ssize_t count,
                         Py_ssize_t block, bint calling_thread, real kind) noexcept nogil:
    # Makes the groups ready that the tile touches, the rows below and to the right included. So are those between the
    # first and the last one of a level that are known to be ready: only the ends need to be looked at.
    cdef Py_ssize_t part = unit.part, k, point, width, first, last
    cdef double lowest, highest
    if not call.want_value and slot.unpacked == 0:
        return
    find_touched_rows(slot, samples, count)
    for k in range(call.parts.level_count(part)):
        width = call.parts.levels[call.parts.members[call.parts.begin[part] + k], 1]
        lowest, highest = INFINITY, -INFINITY
        for point in range(call.points):
            lowest = min(lowest, slot.lowest_row[k * call.points + point])
            highest = max(highest, slot.highest_row[k * call.points + point])
        if lowest > highest:
            continue
        first = max(0, <Py_ssize_t>lowest) // GROUP_ROWS
        last = min(unit.rows - 1, <Py_ssize_t>highest + width + 1) // GROUP_ROWS
        if slot.place_mask != OWN_PLACES:
            slot.may_come_back += 1
            if last - first > slot.place_mask or slot.may_come_back < 0:
                give_up_window(call, slot, unit, calling_thread, kind)
            elif first > slot.last_group[k] + 1 or last + 1 < slot.first_group[k]:
                # Those between need not be there.
                forget_ready(call, slot, part)
        if slot.first_group[k] > slot.last_group[k]:
            slot.first_group[k], slot.last_group[k] = first, first - 1 # none yet
        while first < slot.first_group[k]:
            make_ready(call, slot, unit, slot.first_group[k] - 1, block, calling_thread, kind)
            slot.first_group[k] -= 1
        while slot.last_group[k] < last:
            make_ready(call, slot, unit, slot.last_group[k] + 1, block, calling_thread, kind)
            slot.last_group[k] += 1
