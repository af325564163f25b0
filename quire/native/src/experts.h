/* A layer of experts, dealt out to the pool. */
#ifndef QUIRE_EXPERTS_H
#define QUIRE_EXPERTS_H

#include "pool.h"
#include "quire_native.h"

void qn_run_experts(qn_pool *pool, const qn_op *op, int64_t rows, void *scratch);

#endif
