/* Adapters' share of a product. */
#ifndef QUIRE_ADAPT_H
#define QUIRE_ADAPT_H

#include "pool.h"
#include "quire_native.h"

/* Scratch: (width + out_stride) floats for each row. */
void qn_adapt(qn_pool *pool, const qn_op *op, const qn_step *step, int64_t rows, float *scratch);

#endif
