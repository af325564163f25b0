/* Attention over a paged cache of latents, compiled once for each instruction set.
 *
 * A token's row in the cache is [latent | rotated key], and all heads share it: it is the key of
 * every query, and its latent the value. Rows lie one after the other, so numbers of a row are
 * lanes: a score is a sum in 16 chains and a fixed tree. Spans and their order are attend.c's.
 */
#include "heads.h"
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"
#include "softmax.h"

#define INLINE static inline __attribute__((always_inline))
#define MAX_ROWS 64 /* of scores held at once */
#define VECTORS (WIDE / LANES)
#define KEYS (LANES == 16 ? 2 : 1) /* whose scores are computed at once, as registers allow */

/* ------------------------------------------------------------------ store */

static void store_row(const qn_latents *l, int64_t slot, const float *latent, const float *key) {
    const int64_t at = slot * (l->rank + l->rope);
    if (l->is_half) {
        round_head(latent, l->rank, (uint16_t *)l->cache + at);
        round_head(key, l->rope, (uint16_t *)l->cache + at + l->rank);
    } else {
        memcpy((float *)l->cache + at, latent, (size_t)l->rank * 4);
        memcpy((float *)l->cache + at + l->rank, key, (size_t)l->rope * 4);
    }
}

/* Queries in x, rotated into `out`; latents in y and keys in `weight` (by `out_stride`) stored. */
void KERNEL(store_latents)(const qn_op *op, const qn_step *step, int64_t begin, int64_t end) {
    const qn_latents *l = op->more;
    const int width = l->plain + l->rope, half = l->rope / 2;
    float key[MAX_LATENT];
    for (int64_t row = begin; row < end; row++) {
        const float *cos_at = l->cos + step->positions[row] * half;
        const float *sin_at = l->sin + step->positions[row] * half;
        float *q = op->out + row * l->num_heads * width;
        memcpy(q, op->x + row * op->x_stride, (size_t)(l->num_heads * width) * 4);
        for (int head = 0; head < l->num_heads; head++)
            rotate_head(q + head * width + l->plain, cos_at, sin_at, half);
        memcpy(key, op->weight + row * op->out_stride, (size_t)l->rope * 4);
        rotate_head(key, cos_at, sin_at, half);
        store_row(l, step->slots[l->group][row], op->y + row * l->rank, key);
    }
}

/* ------------------------------------------------------------------ a span */

typedef struct {
    const qn_latents *l;
    int64_t places[SPAN]; /* of its keys */
    int start, end;       /* position of the first; how many any query sees */
} span;

/* One row: a query's head. */
typedef struct {
    const float *q;
    float *out;
    level *at;
    int end; /* of the positions it sees */
    int query;
} query_row;

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

INLINE vf number_at(const qn_latents *l, int64_t at, const int is_half) {
    return is_half ? vf_half((const uint16_t *)l->cache + at)
                   : vf_load((const float *)l->cache + at);
}

/* In a tree, keys behind `position` are those of one query: the drafts before it. */
static void locate(span *s, const qn_step *step, const qn_unit *unit, int query) {
    const int size = step->page_size, width = s->l->rank + s->l->rope;
    const qn_queries *q = &unit->queries;
    const int32_t *path = q->paths ? q->paths + query * q->path_stride : 0;
    const int32_t *table = step->tables[s->l->group] + (int64_t)q->table_row * step->table_stride;
    for (int k = 0; k < s->end; k++) {
        int at = s->start + k;
        if (path && at > q->position) at = path[at - q->position];
        s->places[k] = ((int64_t)table[at / size] * size + at % size) * width;
    }
}

/* Products of `rows` queries with `keys` keys from k on. */
INLINE void scores_of(const span *s, const query_row *q, const int rows, int k, const int keys,
                      const int is_half, float *scores) {
    const int width = s->l->rank + s->l->rope;
    vf acc[4][KEYS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < keys; i++)
            for (int v = 0; v < VECTORS; v++) acc[r][i][v] = vf_set(0.0f);
    for (int d = 0; d < width; d += WIDE)
        for (int v = 0; v < VECTORS; v++) {
            vf key[KEYS];
            for (int i = 0; i < keys; i++)
                key[i] = number_at(s->l, s->places[k + i] + d + v * LANES, is_half);
            for (int r = 0; r < rows; r++) {
                const vf x = vf_load(q[r].q + d + v * LANES);
                for (int i = 0; i < keys; i++) acc[r][i][v] = vf_fma(key[i], x, acc[r][i][v]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < keys; i++) {
            float lanes[WIDE];
            for (int v = 0; v < VECTORS; v++) vf_store(lanes + v * LANES, acc[r][i][v]);
            scores[r * SPAN + k + i] = tree_sum(lanes);
        }
}

/* out += p[k] * latent[k] over keys [from, to) in order; some vectors, from `at` on. */
INLINE void add_latents(const span *s, int from, int to, int at, const float *const *p,
                        const int rows, const int vectors, const int is_half, float *const *out) {
    vf acc[4][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = vf_load(out[r] + at + i * LANES);
    for (int k = from; k < to; k++) {
        vf v[4];
        for (int i = 0; i < vectors; i++)
            v[i] = number_at(s->l, s->places[k] + at + i * LANES, is_half);
        for (int r = 0; r < rows; r++) {
            const vf w = vf_set(p[r][k]);
            for (int i = 0; i < vectors; i++) acc[r][i] = vf_fma(v[i], w, acc[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) vf_store(out[r] + at + i * LANES, acc[r][i]);
}

/* A call whose number of rows is known to the compiler, which keeps sums in registers. */
#define BY_ROWS(rows, call) \
    switch (rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    default: call(4); break; \
    }

static void score_keys(const span *s, const query_row *q, int rows, float *scores) {
    const int is_half = s->l->is_half;
    int k = 0;
#define HALVES(n) scores_of(s, q, n, k, KEYS, 1, scores)
#define FLOATS(n) scores_of(s, q, n, k, KEYS, 0, scores)
#define ONE_OF_HALVES(n) scores_of(s, q, n, k, 1, 1, scores)
#define ONE_OF_FLOATS(n) scores_of(s, q, n, k, 1, 0, scores)
    for (; k + KEYS <= s->end; k += KEYS) {
        if (is_half) BY_ROWS(rows, HALVES)
        else BY_ROWS(rows, FLOATS)
    }
    for (; k < s->end; k++) {
        if (is_half) BY_ROWS(rows, ONE_OF_HALVES)
        else BY_ROWS(rows, ONE_OF_FLOATS)
    }
}

static void weigh_latents(const span *s, int from, int to, const float *const *p, int rows,
                          float *const *out) {
    const int is_half = s->l->is_half, rank = s->l->rank;
    int at = 0;
    if (from >= to) return;
#define FOUR_HALVES(n) add_latents(s, from, to, at, p, n, 4, 1, out)
#define FOUR_FLOATS(n) add_latents(s, from, to, at, p, n, 4, 0, out)
#define HALVES_OF_ONE(n) add_latents(s, from, to, at, p, n, 1, 1, out)
#define FLOATS_OF_ONE(n) add_latents(s, from, to, at, p, n, 1, 0, out)
    for (; rank - at >= 4 * LANES; at += 4 * LANES) {
        if (is_half) BY_ROWS(rows, FOUR_HALVES)
        else BY_ROWS(rows, FOUR_FLOATS)
    }
    for (; at < rank; at += LANES) {
        if (is_half) BY_ROWS(rows, HALVES_OF_ONE)
        else BY_ROWS(rows, FLOATS_OF_ONE)
    }
}

/* Scores of the first `end` keys become weights; they are held in whole vectors. */
static level soften(float *s, int end, float scale) {
    const int high = (end + WIDE - 1) / WIDE * WIDE;
    float lanes[WIDE];
    for (int k = 0; k < high; k += LANES) vf_store(s + k, vf_mul(vf_load(s + k), vf_set(scale)));
    for (int k = end; k < high; k++) s[k] = -INFINITY;
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf most = vf_load(s + lane);
        for (int k = WIDE + lane; k < high; k += WIDE) most = vf_max(most, vf_load(s + k));
        vf_store(lanes + lane, most);
    }
    level found = {lanes[0], 0.0f};
    for (int i = 1; i < WIDE; i++) found.top = lanes[i] > found.top ? lanes[i] : found.top;
    for (int k = 0; k < high; k += LANES)
        vf_store(s + k, vf_exp(vf_sub(vf_load(s + k), vf_set(found.top))));
    for (int k = end; k < high; k++) s[k] = 0.0f;
    found.sum = row_sum(s, high);
    return found;
}

/* Up to four rows: weights times latents, into what they have of earlier spans. */
static void fold_span(const span *s, query_row *rows, int count, float *scores) {
    float sums[4][MAX_LATENT], *out[4];
    const float *p[4];
    level levels[4];
    int end[4], all = SPAN; /* keys that all of them see */
    score_keys(s, rows, count, scores);
    for (int i = 0; i < count; i++) {
        end[i] = larger(smaller(rows[i].end - s->start, SPAN), 0);
        all = smaller(all, end[i]);
        p[i] = scores + i * SPAN;
        levels[i] = (level){0.0f, 0.0f};
        if (end[i]) levels[i] = soften(scores + i * SPAN, end[i], s->l->scale);
        out[i] = sums[i];
        memset(sums[i], 0, (size_t)s->l->rank * 4);
    }
    weigh_latents(s, 0, all, p, count, out);
    for (int i = 0; i < count; i++) {
        weigh_latents(s, all, end[i], p + i, 1, out + i);
        fold(rows[i].at, rows[i].out, levels[i], sums[i], s->l->rank);
    }
}

/* ------------------------------------------------------------------ units */

static int heads_each(const qn_latents *l) { return l->num_heads / l->shares; }

static query_row row_of(const qn_op *op, const qn_unit *unit, int row) {
    const qn_latents *l = op->more;
    const int query = row / heads_each(l);
    const int head = unit->kv_head * heads_each(l) + row % heads_each(l);
    const int64_t at = (unit->queries.row + query) * l->num_heads + head;
    return (query_row){op->x + at * (l->rank + l->rope), op->out + at * l->rank, 0,
                       qn_seen(&unit->queries, query), query};
}

static void divide(float *out, int size, float by) {
    for (int i = 0; i < size; i += LANES)
        vf_store(out + i, vf_div(vf_load(out + i), vf_set(by)));
}

/* What some rows see of a span. */
static void attend_span(span *s, const qn_step *step, const qn_unit *unit, query_row *rows,
                        int num_rows, float *scores) {
    int end = rows[0].end;
    for (int r = 1; r < num_rows; r++) end = larger(end, rows[r].end);
    s->end = smaller(end - s->start, SPAN);
    if (s->end <= 0) return;
    locate(s, step, unit, rows[0].query);
    for (int r = 0; r < num_rows; r += 4)
        fold_span(s, rows + r, smaller(num_rows - r, 4), scores);
}

static void attend_rows(const qn_op *op, const qn_step *step, const qn_unit *unit, int first,
                        int num_rows) {
    const qn_latents *l = op->more;
    _Alignas(64) float scores[4 * SPAN];
    query_row rows[MAX_ROWS];
    level levels[MAX_ROWS];
    for (int r = 0; r < num_rows; r++) {
        rows[r] = row_of(op, unit, first + r);
        rows[r].at = &levels[r];
        if (unit->parts) {
            float *part = unit->parts + (int64_t)(first + r) * (l->rank + PART_HEAD);
            rows[r].at = (level *)part;
            rows[r].out = part + PART_HEAD;
        }
        *rows[r].at = (level){0.0f, 0.0f};
    }
    span s = {.l = l};
    for (int i = unit->first; i < unit->end; i++) {
        s.start = i * SPAN;
        /* Rows that have keys of their own in the span take it query by query. */
        const int is_own = unit->queries.paths && s.start + SPAN > unit->queries.position + 1;
        for (int r = 0, count = num_rows; r < num_rows; r += count) {
            if (is_own)
                for (count = 1; r + count < num_rows && rows[r + count].query == rows[r].query;)
                    count++;
            attend_span(&s, step, unit, rows + r, count, scores);
        }
    }
    for (int r = 0; !unit->parts && r < num_rows; r++) divide(rows[r].out, l->rank, levels[r].sum);
}

void KERNEL(attend_latents)(const qn_op *op, const qn_step *step, const qn_unit *unit) {
    const int rows = unit->queries.count * heads_each(op->more);
    for (int first = 0; first < rows; first += MAX_ROWS)
        attend_rows(op, step, unit, first, smaller(rows - first, MAX_ROWS));
}

/* Parts of all spans, [spans, rows, PART_HEAD + rank], into the result. */
void KERNEL(join_latents)(const qn_op *op, const qn_unit *unit, int num_spans, const float *parts) {
    const qn_latents *l = op->more;
    const int rows = unit->queries.count * heads_each(l);
    for (int r = 0; r < rows; r++) {
        const query_row row = row_of(op, unit, r);
        level at = {0.0f, 0.0f};
        for (int i = 0; i < num_spans; i++) {
            const float *part = parts + ((int64_t)i * rows + r) * (l->rank + PART_HEAD);
            fold(&at, row.out, *(const level *)part, part + PART_HEAD, l->rank);
        }
        divide(row.out, l->rank, at.sum);
    }
}
