/* Every thread has a share of a job's units, side by side, and takes a few of them at a time; whoever
 * is done goes on with the others' shares. So a thread reads a weight in one stream, and a core that
 * is taken away delays its own few units alone.
 *
 * A job is announced by its number. Workers look for a new number in a short spin, then sleep on a
 * condition. The caller works too, and waits until every worker that joined the job has left it.
 */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SPINS 4000 /* about 50 us: steps of small models come faster than threads wake up */
#define LINE 64    /* bytes that cores hand to each other at once */

typedef struct {
    _Alignas(LINE) _Atomic int64_t next;
    int64_t end;
} share;

struct qn_pool {
    int num_workers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Alignas(LINE) _Atomic uint64_t job; /* even: none is open; the next odd number opens one */
    qn_work work;
    void *arg;
    int64_t grain;
    const int32_t *stop; /* of the job's caller, or NULL */
    _Alignas(LINE) _Atomic int inside;
    _Atomic int sleeping;
    _Atomic int busy; /* with somebody's job */
    share shares[];   /* the caller's first */
};

typedef struct {
    qn_pool *pool;
    int index;
} seat;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static _Thread_local const int32_t *heeded;

void qn_heed(const int32_t *stop) { heeded = stop; }

static int is_stopped(const qn_pool *pool) {
    return pool->stop && __atomic_load_n(pool->stop, __ATOMIC_RELAXED);
}

static void take_units(qn_pool *pool, int index) {
    const int count = pool->num_workers + 1;
    for (int i = 0; i < count; i++) {
        share *at = &pool->shares[(index + i) % count];
        while (atomic_load_explicit(&at->next, memory_order_relaxed) < at->end) {
            if (is_stopped(pool)) return;
            const int64_t begin = atomic_fetch_add(&at->next, pool->grain);
            const int64_t end = begin + pool->grain;
            if (begin < at->end) pool->work(pool->arg, begin, end < at->end ? end : at->end);
        }
    }
}

static void sleep_until_job(qn_pool *pool, uint64_t seen) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleeping, 1);
    while (atomic_load(&pool->job) <= seen)
        pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->sleeping, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *worker(void *arg) {
    const seat own = *(seat *)arg;
    free(arg);
    qn_pool *pool = own.pool;
    uint64_t seen = 0;
    int spins = 0;
    for (;;) {
        uint64_t job = atomic_load(&pool->job);
        if (job <= seen || job % 2 == 0) {
            if (++spins < SPINS) {
                relax();
            } else {
                sleep_until_job(pool, job > seen ? job : seen);
                spins = 0;
            }
            continue;
        }
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->job) == job) /* else it closed before this thread was counted */
            take_units(pool, own.index);
        atomic_fetch_sub(&pool->inside, 1);
        seen = job;
        spins = 0;
    }
    return 0; /* never: pools live as long as the process */
}

static int add_worker(qn_pool *pool) {
    seat *own = malloc(sizeof *own);
    pthread_t thread;
    if (!own) return 0;
    *own = (seat){pool, pool->num_workers + 1};
    if (pthread_create(&thread, 0, worker, own)) {
        free(own);
        return 0;
    }
    pthread_detach(thread); /* it sleeps until the process ends */
    pool->num_workers++;
    return 1;
}

qn_pool *qn_pool_new(int num_threads) {
    const size_t wanted = num_threads > 1 ? (size_t)num_threads : 1;
    const size_t size = sizeof(qn_pool) + wanted * sizeof(share);
    qn_pool *pool = aligned_alloc(LINE, size);
    if (!pool) return 0;
    *pool = (qn_pool){0};
    pthread_mutex_init(&pool->lock, 0);
    pthread_cond_init(&pool->wake, 0);
    while (pool->num_workers + 1 < (int)wanted && add_worker(pool)) {}
    return pool;
}

int qn_pool_threads(const qn_pool *pool) { return pool->num_workers + 1; }

void qn_share(qn_pool *pool, qn_work work, void *job, int64_t count, int64_t grain) {
    const int64_t threads = pool->num_workers + 1;
    int is_busy = 0; /* another engine of this process may be at work: then without help */
    if (threads == 1 || count <= grain ||
        !atomic_compare_exchange_strong(&pool->busy, &is_busy, 1)) {
        if (count > 0) work(job, 0, count);
        return;
    }
    pool->work = work;
    pool->arg = job;
    pool->grain = grain;
    pool->stop = heeded;
    const int64_t grains = (count + grain - 1) / grain; /* no share begins within one */
    for (int64_t i = 0; i < threads; i++) {
        const int64_t end = (i + 1) * grains / threads * grain;
        pool->shares[i].end = end < count ? end : count;
        atomic_store_explicit(&pool->shares[i].next, i * grains / threads * grain,
                              memory_order_relaxed);
    }
    atomic_fetch_add(&pool->job, 1); /* odd: open */
    if (atomic_load(&pool->sleeping)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    take_units(pool, 0);
    atomic_fetch_add(&pool->job, 1); /* closed: nobody joins any more */
    while (atomic_load(&pool->inside)) relax();
    atomic_store(&pool->busy, 0);
}
