/* Attention over a paged cache, compiled once for each instruction set.
 *
 * A query takes its keys span by span; spans start at multiples of SPAN, whatever a step feeds. In
 * a span the softmax is relative to the span's own maximum, and keys are added in order; the spans
 * of a query are folded together from the first to the last. So a query's bits depend on its own
 * keys and values alone. Arithmetic is fp32, also on a cache of fp16.
 *
 * What is no number stays none: a score of NaN or +infinity makes its query's result NaN. One of
 * -infinity has no weight, unless all that the query sees in a span are so: then NaN too.
 */
#include "cache.h"
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"
#include "softmax.h"
#include "rows.h"

#define MAX_ROWS 64 /* of scores held at once: queries times the heads that share keys */
#define VECTORS (RUN / LANES) /* of a run's tokens */
#if LANES == 16
#define TILES 4 /* runs of keys whose scores are computed at once, as many as registers hold */
#else
#define TILES 1
#endif
#define INLINE static inline __attribute__((always_inline))

/* ------------------------------------------------------------------ a span */

typedef struct {
    const qn_heads *h;
    layout l;
    int start;            /* position of the span's first key; the rest counts from there */
    int begin, end;       /* keys that any of the queries sees */
    int64_t places[SPAN]; /* of the runs that hold them */
} span;

static void locate(span *s, const qn_step *step, const qn_unit *unit) {
    const layout l = s->l;
    const int32_t *table =
        step->tables[s->h->group] + (int64_t)unit->queries.table_row * step->table_stride;
    for (int run = s->begin / l.run; run * l.run < s->end; run++) {
        const int at = s->start / l.run + run;
        s->places[run] = place_of(s->h, l, table[at / l.runs_each], at % l.runs_each, unit->kv_head);
    }
}

INLINE vf load_number(const void *from, int64_t at, const int is_half) {
    return is_half ? vf_half((const uint16_t *)from + at) : vf_load((const float *)from + at);
}

static inline const void *number_at(const void *from, int64_t at, int is_half) {
    return (const char *)from + at * (is_half ? 2 : 4);
}

/* Products of `rows` queries with some runs of keys: each one chain over the head's dimensions. */
INLINE void scores_of(const float *const *q, const int rows, const void *const *keys,
                      const int tiles, int dim, const int is_half, float *const *into) {
    const int vectors = tiles * VECTORS;
    vf acc[4][TILES * VECTORS];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = vf_set(0.0f);
    for (int d = 0; d < dim; d++) {
        vf k[TILES * VECTORS];
        for (int i = 0; i < vectors; i++)
            k[i] = load_number(keys[i / VECTORS], d * RUN + i % VECTORS * LANES, is_half);
        for (int r = 0; r < rows; r++) {
            const vf x = vf_set(q[r][d]);
            for (int i = 0; i < vectors; i++) acc[r][i] = vf_fma(k[i], x, acc[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) vf_store(into[r] + i * LANES, acc[r][i]);
}

/* A call whose numbers of rows and so on are known to the compiler, which keeps sums in registers. */
#define BY_ROWS(rows, call) \
    switch (rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    default: call(4); break; \
    }

static void tile_scores(const float *const *q, int rows, const void *const *keys, int tiles,
                        const qn_heads *h, float *const *into) {
    const int dim = h->head_dim;
#define HALVES(n) scores_of(q, n, keys, TILES, dim, 1, into)
#define FLOATS(n) scores_of(q, n, keys, TILES, dim, 0, into)
#define HALVES_OF_ONE(n) scores_of(q, n, keys, 1, dim, 1, into)
#define FLOATS_OF_ONE(n) scores_of(q, n, keys, 1, dim, 0, into)
    if (tiles == TILES && h->is_half) BY_ROWS(rows, HALVES)
    else if (tiles == TILES) BY_ROWS(rows, FLOATS)
    else if (h->is_half) BY_ROWS(rows, HALVES_OF_ONE)
    else BY_ROWS(rows, FLOATS_OF_ONE)
}

/* out += p[k] * values[k] over keys [from, to) in order; some vectors of a head, from `at` on. */
INLINE void add_values(const span *s, int from, int to, int at, const float *const *p,
                       const int rows, const int vectors, const int is_half, float *const *out) {
    const int run = s->l.run, dim = s->h->head_dim;
    vf acc[4][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = vf_load(out[r] + at + i * LANES);
    for (int k = from; k < to;) {
        int64_t place = s->places[k / run] + k % run * dim + at;
        const int stop = (k / run + 1) * run < to ? (k / run + 1) * run : to;
        for (; k < stop; k++, place += dim) {
            vf v[4];
            for (int i = 0; i < vectors; i++)
                v[i] = load_number(s->h->values, place + i * LANES, is_half);
            for (int r = 0; r < rows; r++) {
                const vf w = vf_set(p[r][k]);
                for (int i = 0; i < vectors; i++) acc[r][i] = vf_fma(v[i], w, acc[r][i]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) vf_store(out[r] + at + i * LANES, acc[r][i]);
}

static void weigh_values(const span *s, int from, int to, const float *const *p, int rows,
                         float *const *out) {
    const int dim = s->h->head_dim, is_half = s->h->is_half;
    int at = 0;
    if (from >= to) return;
#define FOUR_HALVES(n) add_values(s, from, to, at, p, n, 4, 1, out)
#define FOUR_FLOATS(n) add_values(s, from, to, at, p, n, 4, 0, out)
#define ONE_OF_HALVES(n) add_values(s, from, to, at, p, n, 1, 1, out)
#define ONE_OF_FLOATS(n) add_values(s, from, to, at, p, n, 1, 0, out)
    for (; dim - at >= 4 * LANES; at += 4 * LANES) {
        if (is_half) BY_ROWS(rows, FOUR_HALVES)
        else BY_ROWS(rows, FOUR_FLOATS)
    }
    for (; at < dim; at += LANES) {
        if (is_half) BY_ROWS(rows, ONE_OF_HALVES)
        else BY_ROWS(rows, ONE_OF_FLOATS)
    }
}

/* ------------------------------------------------------------------ softmax */

/* Scores of the keys [begin, end) become weights; what lies around them in their runs, zeros. */
static level soften(float *s, int begin, int end, const qn_heads *h) {
    const int low = begin / WIDE * WIDE, high = (end + WIDE - 1) / WIDE * WIDE;
    float lanes[WIDE];
    for (int k = low; k < high; k += LANES) {
        vf x = vf_mul(vf_load(s + k), vf_set(h->scale));
        if (h->softcap > 0.0f)
            x = vf_mul(vf_tanh(vf_div(x, vf_set(h->softcap))), vf_set(h->softcap));
        vf_store(s + k, x);
    }
    for (int k = low; k < begin; k++) s[k] = -INFINITY;
    for (int k = end; k < high; k++) s[k] = -INFINITY;
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf most = vf_load(s + low + lane);
        for (int k = low + WIDE + lane; k < high; k += WIDE) most = vf_max(most, vf_load(s + k));
        vf_store(lanes + lane, most);
    }
    level found = {lanes[0], 0.0f};
    for (int i = 1; i < WIDE; i++) found.top = lanes[i] > found.top ? lanes[i] : found.top;
    for (int k = low; k < high; k += LANES)
        vf_store(s + k, vf_exp(vf_sub(vf_load(s + k), vf_set(found.top))));
    for (int k = low; k < begin; k++) s[k] = 0.0f;
    for (int k = end; k < high; k++) s[k] = 0.0f;
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc = vf_set(0.0f);
        for (int k = low + lane; k < high; k += WIDE) acc = vf_add(acc, vf_load(s + k));
        vf_store(lanes + lane, acc);
    }
    found.sum = tree_sum(lanes);
    return found;
}

/* The sink takes its share and brings no value; then the weights are made to sum to one. */
static void finish(level at, float *out, int dim, const float *sink) {
    float by = 1.0f;
    if (sink) {
        const level both = factors(at.top, *sink);
        by = both.top;
        at.sum = lane_fma(at.sum, by, both.sum);
    }
    for (int i = 0; i < dim; i += LANES)
        vf_store(out + i, vf_div(vf_mul(vf_load(out + i), vf_set(by)), vf_set(at.sum)));
}

/* ------------------------------------------------------------------ units */

/* One row: a query's head. */
typedef struct {
    const float *q;
    float *out;       /* of the running sum, here or in a part */
    level *at;
    int begin, end;   /* positions of the keys it sees */
    int head;
} query_row;

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

static query_row row_of(const qn_op *op, const qn_unit *unit, int row) {
    const qn_heads *h = op->heads;
    const int ratio = h->num_heads / h->num_kv_heads, query = row / ratio;
    const int head = unit->kv_head * ratio + row % ratio, end = unit->queries.position + query + 1;
    const int64_t place =
        ((unit->queries.row + query) * h->num_heads + head) * (int64_t)h->head_dim;
    const int begin = h->window && end > h->window ? end - h->window : 0;
    return (query_row){op->x + place, op->out + place, 0, begin, end, head};
}

/* Rows in groups of up to four, as even as can be. */
static int group_of(int left) { return (left + (left + 3) / 4 - 1) / ((left + 3) / 4); }

static void score_span(const span *s, const query_row *rows, int num_rows, float *scores) {
    const int run = s->l.run;
    _Alignas(64) char gathered[MAX_HEAD * RUN * 4];
    const void *keys[TILES];
    for (int k = s->begin / RUN * RUN, tiles; k < s->end; k += tiles * RUN) {
        tiles = run == RUN && s->end - k > (TILES - 1) * RUN ? TILES : 1;
        for (int t = 0; run == RUN && t < tiles; t++)
            keys[t] = number_at(s->h->keys, s->places[k / RUN + t], s->h->is_half);
        if (run < RUN) { /* pages of fewer tokens: lay them side by side */
            const size_t size = s->h->is_half ? 2 : 4;
            memset(gathered, 0, sizeof gathered);
            for (int r = k / run; r < (k + RUN) / run; r++)
                for (int d = 0; r >= s->begin / run && r * run < s->end && d < s->h->head_dim; d++)
                    memcpy(gathered + (d * RUN + r * run - k) * size,
                           number_at(s->h->keys, s->places[r] + d * run, s->h->is_half),
                           run * size);
            keys[0] = gathered;
        }
        for (int r = 0, count; r < num_rows; r += count) {
            const float *q[4];
            float *into[4];
            count = group_of(num_rows - r);
            for (int i = 0; i < count; i++) {
                q[i] = rows[r + i].q;
                into[i] = scores + (r + i) * SPAN + k;
            }
            tile_scores(q, count, keys, tiles, s->h, into);
        }
    }
}

/* Weights times values of up to four rows, into what they have of earlier spans. */
static void fold_span(const span *s, query_row *rows, int count, float *const *scores) {
    float sums[4][MAX_HEAD], *out[4];
    level levels[4];
    int begin[4], end[4], from = 0, to = SPAN; /* keys that all of them see */
    for (int i = 0; i < count; i++) {
        begin[i] = larger(rows[i].begin - s->start, 0);
        end[i] = larger(smaller(rows[i].end - s->start, SPAN), begin[i]);
        from = larger(from, begin[i]);
        to = smaller(to, end[i]);
        levels[i] = (level){0.0f, 0.0f};
        if (begin[i] < end[i]) levels[i] = soften(scores[i], begin[i], end[i], s->h);
        out[i] = sums[i];
        memset(sums[i], 0, (size_t)s->h->head_dim * 4);
    }
    const float *const *p = (const float *const *)scores;
    if (from >= to) from = to = SPAN; /* nothing in common: all by itself */
    for (int i = 0; i < count; i++)
        weigh_values(s, begin[i], smaller(from, end[i]), p + i, 1, out + i);
    weigh_values(s, from, to, p, count, out);
    for (int i = 0; i < count; i++) {
        weigh_values(s, larger(begin[i], to), end[i], p + i, 1, out + i);
        fold(rows[i].at, rows[i].out, levels[i], sums[i], s->h->head_dim);
    }
}

static void attend_rows(const qn_op *op, const qn_step *step, const qn_unit *unit, int first,
                        int num_rows) {
    const qn_heads *h = op->heads;
    const int dim = h->head_dim;
    _Alignas(64) float scores[MAX_ROWS * SPAN];
    query_row rows[MAX_ROWS];
    level levels[MAX_ROWS];
    for (int r = 0; r < num_rows; r++) {
        rows[r] = row_of(op, unit, first + r);
        rows[r].at = &levels[r];
        if (unit->parts) {
            float *part = unit->parts + (int64_t)(first + r) * (dim + PART_HEAD);
            rows[r].at = (level *)part;
            rows[r].out = part + PART_HEAD;
        }
        *rows[r].at = (level){0.0f, 0.0f};
    }
    span s = {h, layout_of(step), 0, 0, 0, {0}};
    for (int i = unit->first; i < unit->end; i++) {
        s.start = i * SPAN;
        s.begin = larger(rows[0].begin - s.start, 0);
        s.end = smaller(rows[num_rows - 1].end - s.start, SPAN);
        if (s.begin >= s.end) continue;
        locate(&s, step, unit);
        score_span(&s, rows, num_rows, scores);
        for (int r = 0, count; r < num_rows; r += count) {
            float *p[4];
            count = group_of(num_rows - r);
            for (int j = 0; j < count; j++) p[j] = scores + (r + j) * SPAN;
            fold_span(&s, rows + r, count, p);
        }
    }
    for (int r = 0; !unit->parts && r < num_rows; r++)
        finish(levels[r], rows[r].out, dim, h->sinks ? h->sinks + rows[r].head : 0);
}

void KERNEL(attend)(const qn_op *op, const qn_step *step, const qn_unit *unit) {
    const int rows = unit->queries.count * (op->heads->num_heads / op->heads->num_kv_heads);
    for (int first = 0; first < rows; first += MAX_ROWS)
        attend_rows(op, step, unit, first, smaller(rows - first, MAX_ROWS));
}

/* Parts of all spans, [spans, rows, PART_HEAD + head_dim], into the result. */
void KERNEL(join_parts)(const qn_op *op, const qn_unit *unit, int num_spans, const float *parts) {
    const qn_heads *h = op->heads;
    const int rows = unit->queries.count * (h->num_heads / h->num_kv_heads), dim = h->head_dim;
    for (int r = 0; r < rows; r++) {
        const query_row row = row_of(op, unit, r);
        level at = {0.0f, 0.0f};
        for (int i = 0; i < num_spans; i++) {
            const float *part = parts + ((int64_t)i * rows + r) * (dim + PART_HEAD);
            fold(&at, row.out, *(const level *)part, part + PART_HEAD, dim);
        }
        finish(at, row.out, dim, h->sinks ? h->sinks + row.head : 0);
    }
}
