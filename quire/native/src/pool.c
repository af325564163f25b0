/* Work is dealt out by an atomic counter, so a core that is taken away delays its own unit alone.
 *
 * A job is announced by its number. Workers look for a new number in a short spin, then sleep on a
 * condition. The caller works too, and waits until every worker that joined the job has left it.
 */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SPINS 4000 /* about 50 us: steps of small models come faster than threads wake up */

struct qn_pool {
    int num_workers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic int64_t next;
    _Atomic uint64_t job; /* even: none is open; the next odd number opens one */
    _Atomic int inside, sleeping;
    _Atomic int busy; /* with somebody's job */
    qn_work work;
    void *arg;
    int64_t count, grain;
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_units(qn_pool *pool) {
    for (;;) {
        int64_t begin = atomic_fetch_add(&pool->next, pool->grain);
        if (begin >= pool->count) return;
        int64_t end = begin + pool->grain;
        pool->work(pool->arg, begin, end < pool->count ? end : pool->count);
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
    qn_pool *pool = arg;
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
            take_units(pool);
        atomic_fetch_sub(&pool->inside, 1);
        seen = job;
        spins = 0;
    }
    return 0; /* never: pools live as long as the process */
}

qn_pool *qn_pool_new(int num_threads) {
    qn_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return 0;
    pthread_mutex_init(&pool->lock, 0);
    pthread_cond_init(&pool->wake, 0);
    int wanted = num_threads > 1 ? num_threads - 1 : 0;
    pthread_t thread;
    while (pool->num_workers < wanted && pthread_create(&thread, 0, worker, pool) == 0) {
        pthread_detach(thread); /* they sleep until the process ends */
        pool->num_workers++;
    }
    return pool;
}

int qn_pool_threads(const qn_pool *pool) { return pool->num_workers + 1; }

void qn_share(qn_pool *pool, qn_work work, void *job, int64_t count, int64_t grain) {
    int is_busy = 0; /* another engine of this process may be at work: then without help */
    if (pool->num_workers == 0 || count <= grain ||
        !atomic_compare_exchange_strong(&pool->busy, &is_busy, 1)) {
        if (count > 0) work(job, 0, count);
        return;
    }
    pool->work = work;
    pool->arg = job;
    pool->count = count;
    pool->grain = grain;
    atomic_store(&pool->next, 0);
    atomic_fetch_add(&pool->job, 1); /* odd: open */
    if (atomic_load(&pool->sleeping)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    take_units(pool);
    atomic_fetch_add(&pool->job, 1); /* closed: nobody joins any more */
    while (atomic_load(&pool->inside)) relax();
    atomic_store(&pool->busy, 0);
}
