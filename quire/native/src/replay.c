/* A step as one call: its operations in order, each dealt out to the pool. */
#include "adapt.h"
#include "deal.h"
#include "experts.h"
#include "grouped.h"
#include "kernels.h"
#include "multiply.h"
#include "pool.h"
#include "quire_native.h"

#include <stdlib.h>
#include <string.h>

#define MAX_QUERIES 16 /* of one unit of attention: they share each key */
#define ALONE 4        /* rows up to which an operation is not worth waking anybody */

typedef struct {
    const qn_op *op;
    const qn_step *step;
    const qn_queries *units;
    int64_t num_units;
} job;

static void norm_units(void *arg, int64_t begin, int64_t end) {
    qn_current->norm_rows(((job *)arg)->op, begin, end);
}

static void gate_units(void *arg, int64_t begin, int64_t end) {
    qn_current->gate_rows(((job *)arg)->op, begin, end);
}

static void scale_units(void *arg, int64_t begin, int64_t end) {
    qn_current->scale_rows(((job *)arg)->op, begin, end);
}

static void activate_units(void *arg, int64_t begin, int64_t end) {
    qn_current->activate_rows(((job *)arg)->op, begin, end);
}

static void step_units(void *arg, int64_t begin, int64_t end) {
    qn_current->step_rows(((job *)arg)->op, begin, end);
}

static void route_units(void *arg, int64_t begin, int64_t end) {
    qn_current->route_rows(((job *)arg)->op, begin, end);
}

static void gated_units(void *arg, int64_t begin, int64_t end) {
    qn_current->add_gated(((job *)arg)->op, begin, end);
}

static void store_units(void *arg, int64_t begin, int64_t end) {
    job *j = arg;
    qn_current->store_rows(j->op, j->step, begin, end);
}

static void latent_units(void *arg, int64_t begin, int64_t end) {
    job *j = arg;
    qn_current->store_latents(j->op, j->step, begin, end);
}

static void embed_units(void *arg, int64_t begin, int64_t end) {
    job *j = arg;
    const qn_op *op = j->op;
    for (int64_t row = begin; row < end; row++) {
        float *out = op->out + row * op->width;
        qn_current->expand_row(op->product, j->step->ids[row], out);
        for (int i = 0; op->eps != 1.0f && i < op->width; i++) out[i] *= op->eps;
    }
}

/* out = x + the row of a table that each token's position names */
static void position_units(void *arg, int64_t begin, int64_t end) {
    job *j = arg;
    const int64_t width = j->op->width;
    for (int64_t row = begin; row < end; row++) {
        const float *added = j->op->weight + j->step->positions[row] * width;
        for (int64_t i = 0; i < width; i++)
            j->op->out[row * width + i] = j->op->x[row * width + i] + added[i];
    }
}

static void pick_units(void *arg, int64_t begin, int64_t end) {
    job *j = arg;
    const int64_t width = j->op->width;
    for (int64_t row = begin; row < end; row++)
        memcpy(j->op->out + row * width, j->op->x + j->step->sample_index[row] * width,
               (size_t)width * 4);
}

/* Rows in the order of a weight's columns. */
static void reorder_units(void *arg, int64_t begin, int64_t end) {
    const qn_op *op = ((job *)arg)->op;
    const int32_t *order = op->product->order;
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * op->width;
        float *out = op->out + row * op->width;
        for (int i = 0; i < op->width; i++) out[i] = x[order[i]];
    }
}

/* Of a token of a tree, else NULL. */
static const int32_t *paths_of(const qn_step *s, int64_t token) {
    const int32_t *path = s->paths ? s->paths + token * s->path_stride : 0;
    return path && *path >= 0 ? path : 0;
}

static int32_t end_of(const qn_queries *q) {
    int32_t end = 0;
    for (int i = 0; i < q->count; i++) end = qn_seen(q, i) > end ? qn_seen(q, i) : end;
    return end;
}

/* Queries of a step's tokens, a few neighbours at a time. */
static int64_t token_queries(const qn_step *s, qn_queries *into) {
    int64_t count = 0;
    for (int64_t i = 0; i < s->num_seqs; i++) {
        const int32_t fed = s->query_starts[i + 1] - s->query_starts[i];
        const int32_t first = s->context_lens[i] - fed;
        for (int32_t at = 0; at < fed; at += MAX_QUERIES) {
            const int32_t most = fed - at < MAX_QUERIES ? fed - at : MAX_QUERIES;
            const int32_t token = s->query_starts[i] + at;
            const int32_t *paths = paths_of(s, token);
            const int32_t at_root = paths ? (int32_t)s->positions[token] - *paths : first + at;
            into[count++] = (qn_queries){token, s->rows[i], at_root, most,
                                         first + at + most, paths, s->path_stride};
            if (paths) into[count - 1].end = end_of(&into[count - 1]);
        }
    }
    return count;
}

static int64_t sample_queries(const qn_step *s, qn_queries *into) {
    for (int64_t i = 0; i < s->num_samples; i++) {
        const int32_t at = (int32_t)s->positions[s->sample_index[i]];
        const int32_t *path = paths_of(s, s->sample_index[i]);
        into[i] = (qn_queries){i,      s->sample_rows[i], path ? at - *path : at, 1,
                               at + 1, path,              s->path_stride};
    }
    return s->num_samples;
}

static void run_op(qn_pool *pool, job *j, int64_t rows, void *scratch) {
    const qn_op *op = j->op;
    switch (op->kind) {
    case OP_EMBED: qn_share(pool, embed_units, j, rows, ALONE); break;
    case OP_NORM: qn_share(pool, norm_units, j, rows, ALONE); break;
    case OP_STORE: qn_share(pool, store_units, j, rows, RUN); break; /* lines of the cache */
    case OP_GATE: qn_share(pool, gate_units, j, rows, ALONE); break;
    case OP_SCALE: qn_share(pool, scale_units, j, rows, 2 * ALONE); break;
    case OP_REORDER: qn_share(pool, reorder_units, j, rows, ALONE); break;
    case OP_ACTIVATE: qn_share(pool, activate_units, j, rows, ALONE); break;
    case OP_POSITIONS: qn_share(pool, position_units, j, rows, 2 * ALONE); break;
    case OP_ROUND: qn_share(pool, step_units, j, rows, ALONE); break;
    case OP_ROUTE: qn_share(pool, route_units, j, rows, ALONE); break;
    case OP_EXPERTS: qn_run_experts(pool, op, rows, scratch); break;
    case OP_ADD_GATED: qn_share(pool, gated_units, j, rows, ALONE); break;
    case OP_HEADS: qn_multiply_heads(pool, op, rows); break;
    case OP_ADAPT: qn_adapt(pool, op, j->step, rows, scratch); break;
    case OP_PICK: qn_share(pool, pick_units, j, rows, 4 * ALONE); break;
    case OP_STORE_LATENTS: qn_share(pool, latent_units, j, rows, ALONE); break;
    case OP_ATTEND_LATENTS:
    case OP_ATTEND: qn_attend(pool, op, j->step, j->units, j->num_units); break;
    }
}

static int is_stopped(const qn_step *step) {
    return step->stop && __atomic_load_n(step->stop, __ATOMIC_RELAXED);
}

int qn_run(qn_pool *pool, const qn_op *ops, int64_t num_ops, const qn_step *step, void *scratch) {
    qn_queries *queries = malloc((size_t)(step->num_tokens + 2 * step->num_samples + 1) *
                                 sizeof *queries);
    if (!queries) abort();
    const int64_t num_tokens = token_queries(step, queries);
    const int64_t num_samples = sample_queries(step, queries + num_tokens);
    qn_heed(step->stop);
    int64_t i = 0;
    for (; i < num_ops && !is_stopped(step); i++) {
        const int samples = ops[i].of_samples;
        job j = {&ops[i], step, queries + (samples ? num_tokens : 0),
                 samples ? num_samples : num_tokens};
        const int64_t rows = samples ? step->num_samples : step->num_tokens;
        const qn_chain chain = qn_chain_of(ops + i, num_ops - i, rows);
        if (chain.num_products) {
            qn_run_chain(pool, &chain, rows, scratch);
            i += chain.num_products - 1 + (chain.before != 0);
        } else {
            run_op(pool, &j, rows, scratch);
        }
    }
    qn_heed(0);
    free(queries);
    return i < num_ops || is_stopped(step);
}
