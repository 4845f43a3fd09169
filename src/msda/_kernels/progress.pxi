# How far the work items of a call are: shared by its threads, counted atomically.

cdef extern from "process.h" nogil:
    int64_t msda_count(int64_t* counter)
    int64_t msda_look(const int64_t* counter)
    void msda_set(int64_t* counter, int64_t x)
    void msda_pause(int64_t turn)
    int omp_get_num_threads()

cdef struct Progress:
    int64_t stop        # set where a signal handler raised
    int64_t begun
    int64_t ended
    int64_t items
    int64_t work        # of the calling thread, since it last looked at signals
    int64_t team        # how many threads there were
    bint listening      # whether the calling thread is the one that runs signal handlers
