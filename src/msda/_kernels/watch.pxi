# Ctrl-C. Python runs signal handlers in its main thread alone. Where that thread made the call it is the first of
# the team: it looks at pending signals now and then, and while it waits for the last items of the others.

import threading

cdef extern from "Python.h":
    int PyErr_CheckSignals()

cdef extern from "process.h" nogil:
    void msda_get_fp_mode(msda_fp_mode* mode)
    void msda_default_fp_mode(msda_fp_mode* saved)
    void msda_restore_fp_mode(const msda_fp_mode* saved)

cdef enum:
    # Multiply-adds between two looks at pending signals: some milliseconds.
    WORK_PER_LOOK = 1 << 22
    PAUSES_PER_LOOK = 64
    # What it takes to begin an item, beside its samples.
    WORK_OF_AN_ITEM = 1 << 12


cdef void begin_watch(Call call):
    memset(&call.progress, 0, sizeof(Progress))
    call.progress.team = 1
    msda_get_fp_mode(&call.callers_mode)
    call.progress.listening = threading.get_ident() == threading.main_thread().ident


cdef int end_watch(Call call) except -1:
    # LLVM's OpenMP runtime puts back the mode that it found; a handler may have left another one.
    msda_restore_fp_mode(&call.callers_mode)
    # What the signal handler raised is still set.
    return -1 if call.progress.stop else 0


cdef void expect_items(Call call, Py_ssize_t items) noexcept nogil:
    call.progress.begun = 0
    call.progress.ended = 0
    call.progress.items = items


cdef void begin_item(Call call) noexcept nogil:
    msda_count(&call.progress.begun)
    msda_set(&call.progress.team, omp_get_num_threads())


cdef void end_item(Call call, bint calling_thread) noexcept nogil:
    cdef int64_t turn = 0
    msda_count(&call.progress.ended)
    if not calling_thread:
        return
    if not call.progress.listening or msda_look(&call.progress.begun) < call.progress.items:
        return
    while msda_look(&call.progress.ended) < call.progress.items and not call.progress.stop:
        turn += 1
        if turn % PAUSES_PER_LOOK == 0:
            look_at_signals(call)
        msda_pause(turn)


cdef inline bint go_on(Call call, Slot* slot, bint calling_thread, int64_t work) noexcept nogil:
    # Called after every bit of work, in multiply-adds or elements moved: False once a signal handler has raised.
    if calling_thread and call.progress.listening:
        call.progress.work += work
        if call.progress.work > WORK_PER_LOOK:
            call.progress.work = 0
            # Handlers find the mode that the caller was in, and may leave another one behind.
            msda_restore_fp_mode(&slot.callers_mode)
            look_at_signals(call)
            msda_default_fp_mode(&slot.callers_mode)
    return not msda_look(&call.progress.stop)


cdef void look_at_signals(Call call) noexcept nogil:
    with gil:
        if not call.progress.stop and PyErr_CheckSignals() != 0:
            msda_set(&call.progress.stop, 1)
    msda_get_fp_mode(&call.callers_mode)
