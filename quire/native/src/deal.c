/* Who attends to what: units of attention for the pool.
 *
 * A unit is some queries of a sequence and one kv head. Where such a unit would be a large share of
 * the step, as the only request's is, every span of its keys becomes a unit of its own. Their parts
 * are joined in the order of spans by whoever finishes the last one. A unit that takes all spans
 * joins them in the same order, so what is cut up does not show in the bits.
 */
#include "deal.h"
#include "kernels.h"
#include "pool.h"

#include <stdatomic.h>
#include <stdlib.h>

#define FEW_QUERIES 4 /* more are not cut up: their parts would need much memory */
#define SHARES 4      /* units for each thread, for nobody to wait long for the last */

typedef struct {
    int32_t first, end;
} spans;

typedef struct {
    const qn_op *op;
    const qn_step *step;
    const qn_unit *units;
    _Atomic int32_t *left; /* spans of each joint that are not done yet */
} attention;

static spans spans_of(const qn_heads *h, const qn_queries *q) {
    const int32_t seen = q->position + 1; /* by the first query, its own key included */
    const int32_t oldest = h->window && seen > h->window ? seen - h->window : 0;
    return (spans){oldest / SPAN, (q->end + SPAN - 1) / SPAN};
}

static int64_t part_floats(const qn_heads *h, const qn_queries *q) {
    return (int64_t)q->count * (h->num_heads / h->num_kv_heads) * (h->head_dim + PART_HEAD);
}

static void attend_units(void *arg, int64_t begin, int64_t end) {
    attention *a = arg;
    for (int64_t i = begin; i < end; i++) {
        const qn_unit *unit = &a->units[i];
        const int is_latent = a->op->kind == OP_ATTEND_LATENTS;
        (is_latent ? qn_current->attend_latents : qn_current->attend)(a->op, a->step, unit);
        if (!unit->parts || atomic_fetch_sub(&a->left[unit->joint], 1) > 1) continue;
        const spans all = spans_of(a->op->heads, &unit->queries);
        const float *parts = unit->parts;
        parts -= (unit->first - all.first) * part_floats(a->op->heads, &unit->queries);
        (is_latent ? qn_current->join_latents : qn_current->join_parts)(
            a->op, unit, all.end - all.first, parts);
    }
}

/* Whether spans of these queries are units of their own, when a share is that much work. */
static int is_cut(const qn_queries *q, spans s, int64_t share) {
    return q->count <= FEW_QUERIES && s.end - s.first > 1 && q->count * (s.end - s.first) > share;
}

void qn_attend(qn_pool *pool, const qn_op *op, const qn_step *step, const qn_queries *queries,
               int64_t num_queries) {
    const qn_heads *h = op->heads;
    const int threads = qn_pool_threads(pool);
    int64_t work = 0, num_units = 0, num_joints = 0, num_floats = 0;
    for (int64_t i = 0; i < num_queries; i++) {
        const spans s = spans_of(h, &queries[i]);
        work += queries[i].count * (s.end - s.first) * h->num_kv_heads;
    }
    const int64_t share = threads > 1 ? work / (SHARES * threads) : work;
    for (int64_t i = 0; i < num_queries; i++) {
        const spans s = spans_of(h, &queries[i]);
        const int cut = is_cut(&queries[i], s, share);
        num_units += cut ? s.end - s.first : 1;
        num_joints += cut;
        num_floats += cut ? (s.end - s.first) * part_floats(h, &queries[i]) : 0;
    }
    qn_unit *units = malloc((size_t)(num_units * h->num_kv_heads) * sizeof *units + 1);
    _Atomic int32_t *left = malloc((size_t)(num_joints * h->num_kv_heads) * sizeof *left + 1);
    float *parts = malloc((size_t)(num_floats * h->num_kv_heads) * sizeof *parts + 1);
    if (!units || !left || !parts) abort();
    float *part = parts;
    num_units = num_joints = 0;
    for (int64_t i = num_queries - 1; i >= 0; i--) /* the last queries of a prompt see most */
        for (int kv_head = 0; kv_head < h->num_kv_heads; kv_head++) {
            const spans s = spans_of(h, &queries[i]);
            const int cut = is_cut(&queries[i], s, share);
            qn_unit unit = {queries[i], kv_head, s.first, s.end, 0, (int32_t)num_joints};
            if (!cut) {
                units[num_units++] = unit;
                continue;
            }
            left[num_joints++] = s.end - s.first;
            for (int32_t span = s.first; span < s.end; span++) {
                unit.first = span, unit.end = span + 1, unit.parts = part;
                part += part_floats(h, &queries[i]);
                units[num_units++] = unit;
            }
        }
    attention job = {op, step, units, left};
    const int64_t grain = num_units / (4 * SHARES * threads);
    qn_share(pool, attend_units, &job, num_units, grain > 1 ? grain : 1);
    free(units);
    free((void *)left);
    free(parts);
}
