/* Products dealt out to the pool. */
#ifndef QUIRE_MULTIPLY_H
#define QUIRE_MULTIPLY_H

#include "pool.h"
#include "quire_native.h"

/* Products of the same rows, and the operation that makes the rows. */
typedef struct {
    const qn_op *before; /* what makes_rows names; NULL: the rows are there */
    const qn_op *products;
    int64_t num_products;
} qn_chain;

/* The longest chain at the head of a list of operations; num_products is 0 if there is none. */
qn_chain qn_chain_of(const qn_op *ops, int64_t num_ops, int64_t rows);

/* The chain's operations, to the same bits as one after the other. */
void qn_run_chain(qn_pool *pool, const qn_chain *chain, int64_t rows, void *scratch);

#endif
