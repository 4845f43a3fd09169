# Packed rows in groups, and which of them a tile of queries comes to.
#
# Neighbouring queries mostly sample neighbouring pixels: a tile touches few of the rows, and the next one almost the
# same. So a group is made ready when a tile first comes to it. Its rows are then still in the cache when they are
# touched, and what lies beyond all that a thread's queries come to is not packed at all.

cdef enum:
    GROUP_ROWS = 64


cdef inline Py_ssize_t row_groups(Py_ssize_t rows) noexcept nogil:
    return (rows + GROUP_ROWS - 1) // GROUP_ROWS


cdef inline Py_ssize_t group_end(Py_ssize_t group, Py_ssize_t rows) noexcept nogil:
    return min(rows, (group + 1) * GROUP_ROWS)


cdef void find_touched_rows(Slot* slot, Py_ssize_t samples, Py_ssize_t count) noexcept nogil:
    # For each sample of a query the lowest and the highest row of its corner 00 among the tile's `count` queries.
    cdef Py_ssize_t s = 0
    while s < samples:
        msda_find_range(slot.row + s, samples, count, slot.lowest_row + s, slot.highest_row + s)
        s += MSDA_PLACED


cdef void make_ready(Call call, Slot* slot, const Unit* unit, Py_ssize_t group, Py_ssize_t block, bint calling_thread,
                     real kind) noexcept nogil:
    # The group's rows of value are there, and those of the gradient hold sums of this block.
    cdef Py_ssize_t other = slot.group_at[place_of(slot, group)]
    if other != group:
        if not go_on(call, slot, calling_thread, 2 * GROUP_ROWS * call.channels):
            return
        if other != NO_GROUP:
            send_away(call, slot, unit, other)
        if slot.has_left[group]:
            slot.tiles_in_hand -= TILES_FOR_ONE_MORE
        if call.reads_value():
            pack_group(call, slot, unit, group, kind)
            if not call.want_value:
                copy_behind_the_end(call, slot, unit, group)
        if call.want_value and slot.block_of_group[group] == block:
            fetch_parked(call, slot, unit, group)
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
            slot.tiles_in_hand += 1
            if last - first > slot.place_mask or slot.tiles_in_hand < 0:
                give_up_window(call, slot, unit, calling_thread)
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
