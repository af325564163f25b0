/* Rows from rank to rank through memory that all of them have mapped.
 *
 * Turns are counted. In each a rank puts some rows into its slot and raises its mark to the turn;
 * then it waits for the marks of all others and reads their slots. Two sets of slots take turns: who
 * raises a mark to turn n has read everything of turn n - 1, so slots of turn n - 2 are free.
 */
#include "quire_native.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define LINE 64     /* bytes that cores hand to each other at once */
#define SPINS 2000  /* some microseconds: ranks of one step are never far apart */
#define YIELDS 200  /* then others may have the core ... */
#define NAP_NS 50000 /* ... and then it is left to them */

typedef struct {
    _Alignas(LINE) _Atomic int64_t turn;
} mark;

static char *slot_of(const qn_exchange *e, int rank, int64_t turn) {
    const int64_t marks = (int64_t)e->size * (int64_t)sizeof(mark);
    return (char *)e->shared + marks + ((turn & 1) * e->size + rank) * e->slot_bytes;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void qn_put(const qn_exchange *e, int64_t turn, const void *rows, int64_t count, int64_t bytes,
            int64_t stride) {
    char *slot = slot_of(e, e->rank, turn);
    for (int64_t i = 0; i < count; i++)
        memcpy(slot + i * bytes, (const char *)rows + i * stride, (size_t)bytes);
    mark *marks = e->shared;
    atomic_store_explicit(&marks[e->rank].turn, turn, memory_order_release);
}

int qn_take(const qn_exchange *e, int64_t turn, int rank, void *rows, int64_t count, int64_t bytes,
            int64_t stride, double wait_s) {
    mark *marks = e->shared;
    double until = 0.0;
    for (int64_t tries = 0;
         atomic_load_explicit(&marks[rank].turn, memory_order_acquire) < turn; tries++) {
        if (tries < SPINS) {
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        } else if (tries < SPINS + YIELDS) {
            sched_yield();
        } else {
            const double now = seconds();
            if (until == 0.0) until = now + wait_s;
            if (now >= until) return 0;
            const struct timespec nap = {0, NAP_NS};
            nanosleep(&nap, NULL);
        }
    }
    const char *slot = slot_of(e, rank, turn);
    for (int64_t i = 0; i < count; i++)
        memcpy((char *)rows + i * stride, slot + i * bytes, (size_t)bytes);
    return 1;
}
