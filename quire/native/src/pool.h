/* A pool of threads that waits by spinning briefly, then sleeps. */
#ifndef QUIRE_POOL_H
#define QUIRE_POOL_H

#include "quire_native.h"

typedef void (*qn_work)(void *job, int64_t begin, int64_t end);

/* Units [0, count) dealt out: neighbours to one thread, `grain` at a time, and to whoever is free. */
void qn_share(qn_pool *pool, qn_work work, void *job, int64_t count, int64_t grain);

/* From now on this thread's jobs are left in the middle once `stop` is not zero; NULL: never. */
void qn_heed(const int32_t *stop);

#endif
