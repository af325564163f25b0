/* Attention of a step, dealt out to the pool. */
#ifndef QUIRE_DEAL_H
#define QUIRE_DEAL_H

#include "quire_native.h"

void qn_attend(qn_pool *pool, const qn_op *op, const qn_step *step, const qn_queries *queries,
               int64_t num_queries);

#endif
