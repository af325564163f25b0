/* Everything of a step between products, compiled once for each instruction set.
 *
 * Sums run in 16 chains over increasing places, then in a fixed tree; the softmax of a query reads
 * its keys in order. So a row's bits depend on that row (and its own keys) alone.
 */
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"

#include <stdlib.h>

#define LINE 16  /* floats of a cache line */
#define AHEAD 16 /* keys whose values are fetched before they are needed */
#define WIDE 16 /* chains of a sum, and keys of a tile */

static float tree_sum(float *at) {
    for (int step = WIDE / 2; step; step /= 2)
        for (int i = 0; i < step; i++) at[i] += at[i + step];
    return at[0];
}

static float tree_max(const float *at) {
    float top = at[0];
    for (int i = 1; i < WIDE; i++) top = at[i] > top ? at[i] : top;
    return top;
}

/* e^x within 2 units in the last place, for x in [-87, 88]; clamped outside. */
static inline vf vf_exp(vf x) {
    x = vf_min(vf_max(x, vf_set(-87.0f)), vf_set(88.0f));
    const vi whole = vi_of_vf(vf_mul(x, vf_set(1.44269504088896341f)));
    const vf n = vf_of_vi(whole);
    vf r = vf_fma(n, vf_set(-0.693359375f), x); /* exact: few bits */
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(r, r), vf_add(r, vf_set(1.0f)));
    return vf_mul(p, vf_bits(vi_shl(vi_add(whole, vi_set(127)), 23)));
}

static inline vf vf_tanh(vf x) { /* 1 - 2 / (e^2x + 1) */
    const vf e = vf_exp(vf_add(x, x));
    return vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), vf_add(e, vf_set(1.0f))));
}

static inline vf activate(vf x, int kind) {
    if (kind == GATE_SILU) return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_set(0.0f), x))));
    if (kind == GATE_RELU2) {
        const vf r = vf_max(x, vf_set(0.0f));
        return vf_mul(r, r);
    }
    const vf cube = vf_mul(vf_mul(x, x), x); /* gelu, by tanh */
    const vf inner = vf_mul(vf_set(0.7978845608028654f), vf_fma(vf_set(0.044715f), cube, x));
    return vf_mul(vf_mul(vf_set(0.5f), x), vf_add(vf_set(1.0f), vf_tanh(inner)));
}

/* 1 / sqrt(mean of squares + eps) of `size` numbers, a multiple of 16. */
static float inverse_rms(const float *x, int size, float eps) {
    float sums[WIDE];
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc = vf_set(0.0f);
        for (int i = lane; i < size; i += WIDE) {
            const vf v = vf_load(x + i);
            acc = vf_fma(v, v, acc);
        }
        vf_store(sums + lane, acc);
    }
    return 1.0f / sqrtf(tree_sum(sums) / (float)size + eps);
}

static void scale_row(const float *x, const float *weight, float factor, int size, float *out) {
    for (int i = 0; i < size; i += LANES)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), vf_set(factor)), vf_load(weight + i)));
}

void KERNEL(norm_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const int size = op->width;
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * size;
        float *sum = op->sum + row * size;
        if (op->y) {
            const float *y = op->y + row * size;
            for (int i = 0; i < size; i += LANES)
                vf_store(sum + i, vf_add(vf_load(x + i), vf_load(y + i)));
            x = sum;
        } else if (op->sum && op->sum != op->x) {
            memcpy(sum, x, (size_t)size * 4);
        }
        scale_row(x, op->weight, inverse_rms(x, size, op->eps), size, op->out + row * size);
    }
}

void KERNEL(gate_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const int size = op->width; /* of the result; gate | up before it */
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * 2 * size;
        for (int i = 0; i < size; i += LANES)
            vf_store(op->out + row * size + i,
                     vf_mul(activate(vf_load(x + i), op->kind_of_gate), vf_load(x + size + i)));
    }
}

/* out = x * factor + y, or without y */
void KERNEL(scale_rows)(const qn_op *op, int64_t begin, int64_t end) {
    for (int64_t i = begin * op->width; i < end * op->width; i += LANES) {
        vf v = vf_load(op->x + i);
        if (op->eps != 1.0f) v = vf_mul(v, vf_set(op->eps));
        if (op->y) v = vf_add(v, vf_load(op->y + i));
        vf_store(op->out + i, v);
    }
}

/* ------------------------------------------------------------------ attention */

static void rotate_head(float *x, const float *cos_at, const float *sin_at, int half) {
    for (int i = 0; i < half; i += LANES) {
        if (half - i < LANES) { /* narrow heads */
            for (int j = i; j < half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = lane_fma(b, 0.0f - sin_at[j], a * cos_at[j]); /* zeros as below */
                x[j + half] = lane_fma(a, sin_at[j], b * cos_at[j]);
            }
            return;
        }
        const vf a = vf_load(x + i), b = vf_load(x + half + i);
        const vf c = vf_load(cos_at + i), s = vf_load(sin_at + i);
        vf_store(x + i, vf_fma(b, vf_sub(vf_set(0.0f), s), vf_mul(a, c)));
        vf_store(x + half + i, vf_fma(a, s, vf_mul(b, c)));
    }
}

/* q | k | v of each token: norms of heads, rotation; q to `out`, k and v into the cache. */
void KERNEL(store_rows)(const qn_op *op, const qn_step *step, int64_t begin, int64_t end) {
    const qn_heads *h = op->heads;
    const int dim = h->head_dim, width = h->num_heads * dim, kv_width = h->num_kv_heads * dim;
    for (int64_t row = begin; row < end; row++) {
        const int64_t position = step->positions[row], slot = step->slots[h->group][row];
        const float *from = op->x + row * (width + 2 * kv_width);
        float *q = op->out + row * width;
        float *k = h->keys + slot * kv_width, *v = h->values + slot * kv_width;
        memcpy(q, from, (size_t)width * 4);
        memcpy(k, from + width, (size_t)kv_width * 4);
        memcpy(v, from + width + kv_width, (size_t)kv_width * 4);
        for (int head = 0; head < h->num_heads + h->num_kv_heads; head++) {
            float *x = head < h->num_heads ? q + head * dim : k + (head - h->num_heads) * dim;
            const float *norm = head < h->num_heads ? h->q_norm : h->k_norm;
            if (norm) scale_row(x, norm, inverse_rms(x, dim, h->norm_eps), dim, x);
            if (h->cos)
                rotate_head(x, h->cos + position * h->rotated / 2,
                            h->sin + position * h->rotated / 2, h->rotated / 2);
        }
    }
}

/* 16 keys by `dim` -> `dim` by 16 */
static void transpose_keys(const float *const *keys, int dim, float *out) {
#if defined(__AVX2__) && !defined(QUIRE_PLAIN)
    for (int d = 0; d < dim; d += 8)
        for (int t = 0; t < WIDE; t += 8) {
            __m256 r[8], s[8];
            for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(keys[t + i] + d);
            for (int i = 0; i < 8; i += 2) {
                s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
            for (int i = 0; i < 8; i += 4) {
                r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
                r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
                r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
                r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
            }
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(out + (d + i) * WIDE + t, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
                _mm256_storeu_ps(out + (d + i + 4) * WIDE + t,
                                 _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
            }
        }
#else
    for (int d = 0; d < dim; d++)
        for (int t = 0; t < WIDE; t++) out[d * WIDE + t] = keys[t][d];
#endif
}

/* Scores of `rows` queries with some tiles of keys: each one chain over the head's dimensions. */
static inline __attribute__((always_inline)) void
scores_of(const float *const *q, const int rows, const int tiles, const float *tile, int dim,
          const qn_heads *h, float *const *into) {
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc[4][2];
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tiles; t++) acc[r][t] = vf_set(0.0f);
        for (int d = 0; d < dim; d++) {
            vf k[2];
            for (int t = 0; t < tiles; t++) k[t] = vf_load(tile + (t * dim + d) * WIDE + lane);
            for (int r = 0; r < rows; r++) {
                const vf x = vf_set(q[r][d]);
                for (int t = 0; t < tiles; t++) acc[r][t] = vf_fma(k[t], x, acc[r][t]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tiles; t++) {
                vf s = vf_mul(acc[r][t], vf_set(h->scale));
                if (h->softcap > 0.0f)
                    s = vf_mul(vf_tanh(vf_div(s, vf_set(h->softcap))), vf_set(h->softcap));
                vf_store(into[r] + t * WIDE + lane, s);
            }
    }
}

static void tile_scores(const float *const *q, int rows, int tiles, const float *tile, int dim,
                        const qn_heads *h, float *const *into) {
    switch (4 * tiles + rows - 5) {
    case 0: scores_of(q, 1, 1, tile, dim, h, into); break;
    case 1: scores_of(q, 2, 1, tile, dim, h, into); break;
    case 2: scores_of(q, 3, 1, tile, dim, h, into); break;
    case 3: scores_of(q, 4, 1, tile, dim, h, into); break;
    case 4: scores_of(q, 1, 2, tile, dim, h, into); break;
    case 5: scores_of(q, 2, 2, tile, dim, h, into); break;
    case 6: scores_of(q, 3, 2, tile, dim, h, into); break;
    default: scores_of(q, 4, 2, tile, dim, h, into); break;
    }
}

/* out = sum of p[k] * values[k] over keys [from, to), going on from out; `chunk` lanes of a head. */
static inline __attribute__((always_inline)) void
add_values(const float *const *values, int at, int from, int to, const float *const *p,
           const int rows, const int vectors, float *const *out) {
    vf acc[4][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = vf_load(out[r] + at + i * LANES);
    for (int k = from; k < to; k++) {
        vf v[4];
        for (int i = 0; i < vectors; i++) v[i] = vf_load(values[k] + at + i * LANES);
        if (k + AHEAD < to)
            for (int i = 0; i < vectors * LANES; i += LINE)
                __builtin_prefetch(values[k + AHEAD] + at + i);
        for (int r = 0; r < rows; r++) {
            const vf w = vf_set(p[r][k]);
            for (int i = 0; i < vectors; i++) acc[r][i] = vf_fma(v[i], w, acc[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) vf_store(out[r] + at + i * LANES, acc[r][i]);
}

static void weigh_values(const float *const *values, int from, int to, const float *const *p,
                         int rows, int dim, float *const *out) {
    if (from >= to) return;
    int at = 0;
    for (; dim - at >= 4 * LANES; at += 4 * LANES) {
        switch (rows) {
        case 1: add_values(values, at, from, to, p, 1, 4, out); break;
        case 2: add_values(values, at, from, to, p, 2, 4, out); break;
        case 3: add_values(values, at, from, to, p, 3, 4, out); break;
        default: add_values(values, at, from, to, p, 4, 4, out); break;
        }
    }
    for (; at < dim; at += LANES)
        for (int r = 0; r < rows; r++) add_values(values, at, from, to, p + r, 1, 1, out + r);
}

static _Thread_local char *scratch_at;
static _Thread_local size_t scratch_size;

static void *scratch(size_t bytes) {
    if (bytes > scratch_size) {
        free(scratch_at);
        scratch_size = bytes + bytes / 2;
        scratch_at = malloc(scratch_size);
        if (!scratch_at) abort();
    }
    return scratch_at;
}

typedef struct {
    int first, end; /* keys that a query sees, counted from the unit's first */
} span;

/* Softmax over what the query sees; the rest becomes zero. Returns the sum. */
static float soften(float *s, span seen, int num_keys, float sink, int has_sink) {
    for (int k = 0; k < seen.first; k++) s[k] = -INFINITY;
    for (int k = seen.end; k < num_keys; k++) s[k] = -INFINITY;
    float lanes[WIDE], top;
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf most = vf_load(s + lane);
        for (int k = WIDE + lane; k < num_keys; k += WIDE) most = vf_max(most, vf_load(s + k));
        vf_store(lanes + lane, most);
    }
    top = tree_max(lanes);
    if (has_sink && sink > top) top = sink;
    for (int k = 0; k < num_keys; k += LANES)
        vf_store(s + k, vf_exp(vf_sub(vf_load(s + k), vf_set(top))));
    memset(s, 0, (size_t)seen.first * 4);
    memset(s + seen.end, 0, (size_t)(num_keys - seen.end) * 4);
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc = vf_set(0.0f);
        for (int k = lane; k < num_keys; k += WIDE) acc = vf_add(acc, vf_load(s + k));
        vf_store(lanes + lane, acc);
    }
    float sum = tree_sum(lanes);
    if (has_sink) {
        float e[LANES];
        vf_store(e, vf_exp(vf_set(sink - top)));
        sum += e[0];
    }
    return sum;
}

/* Some neighbouring queries of one sequence and one kv head. */
void KERNEL(attend)(const qn_op *op, const qn_step *step, qn_queries unit, int kv_head) {
    const qn_heads *h = op->heads;
    const int dim = h->head_dim, ratio = h->num_heads / h->num_kv_heads;
    const int width = h->num_heads * dim, rows = unit.count * ratio;
    const int last = unit.position + unit.count; /* keys up to here */
    int first = 0;
    if (h->window && unit.position + 1 > h->window)
        first = (unit.position + 1 - h->window) / WIDE * WIDE;
    const int num_keys = (last - first + WIDE - 1) / WIDE * WIDE;
    float *scores = scratch((size_t)rows * num_keys * 4 + (size_t)dim * 2 * WIDE * 4 +
                            (size_t)num_keys * 2 * sizeof(float *));
    float *tile = scores + (size_t)rows * num_keys;
    const float **keys = (const float **)(tile + (size_t)dim * 2 * WIDE), **values = keys + num_keys;
    const int32_t *table = step->tables[h->group] + (int64_t)unit.table_row * step->table_stride;
    const int64_t stride = (int64_t)h->num_kv_heads * dim;
    for (int k = 0; k < last - first;) { /* a page at a time */
        const int offset = (first + k) % step->page_size;
        int count = step->page_size - offset;
        if (count > last - first - k) count = last - first - k;
        const int64_t page = table[(first + k) / step->page_size];
        int64_t place = (page * step->page_size + offset) * stride + kv_head * dim;
        for (int i = 0; i < count; i++, k++, place += stride) {
            keys[k] = h->keys + place;
            values[k] = h->values + place;
        }
    }
    for (int k = last - first; k < num_keys; k++) { /* any key will do: it is masked */
        keys[k] = keys[k - 1];
        values[k] = values[k - 1];
    }
    const float *q[4];
    float *into[4], *out[4];
    for (int k = 0, tiles; k < num_keys; k += tiles * WIDE) {
        tiles = num_keys - k >= 2 * WIDE ? 2 : 1;
        for (int t = 0; t < tiles; t++)
            transpose_keys(keys + k + t * WIDE, dim, tile + t * dim * WIDE);
        for (int t = k + 2 * WIDE; t < k + 4 * WIDE && t < num_keys; t++)
            for (int d = 0; d < dim; d += LINE) __builtin_prefetch(keys[t] + d);
        for (int r = 0; r < rows; r += 4) {
            const int count = rows - r < 4 ? rows - r : 4;
            for (int i = 0; i < count; i++) {
                const int query = (r + i) / ratio, head = kv_head * ratio + (r + i) % ratio;
                q[i] = op->x + (unit.row + query) * width + head * dim;
                into[i] = scores + (size_t)(r + i) * num_keys + k;
            }
            tile_scores(q, count, tiles, tile, dim, h, into);
        }
    }
    for (int r = 0; r < rows; r += 4) {
        const int count = rows - r < 4 ? rows - r : 4;
        const float *p[4];
        span seen[4];
        float sums[4];
        int from = 0, to = num_keys; /* keys that all of these see */
        for (int i = 0; i < count; i++) {
            const int query = (r + i) / ratio, head = kv_head * ratio + (r + i) % ratio;
            const int position = unit.position + query;
            const int oldest = h->window && position + 1 > h->window ? position + 1 - h->window : 0;
            seen[i].first = oldest > first ? oldest - first : 0;
            seen[i].end = position + 1 - first;
            from = seen[i].first > from ? seen[i].first : from;
            to = seen[i].end < to ? seen[i].end : to;
            float *s = scores + (size_t)(r + i) * num_keys;
            sums[i] = soften(s, seen[i], num_keys, h->sinks ? h->sinks[head] : 0.0f, h->sinks != 0);
            p[i] = s;
            out[i] = op->out + (unit.row + query) * width + head * dim;
            memset(out[i], 0, (size_t)dim * 4);
        }
        if (from > to) from = to = seen[0].first; /* nothing in common */
        for (int i = 0; i < count; i++) {
            const int middle = seen[i].end < from ? seen[i].end : from;
            weigh_values(values, seen[i].first, middle, p + i, 1, dim, out + i);
        }
        weigh_values(values, from, to, p, count, dim, out);
        for (int i = 0; i < count; i++) {
            const int middle = seen[i].first > to ? seen[i].first : to;
            weigh_values(values, middle, seen[i].end, p + i, 1, dim, out + i);
            for (int d = 0; d < dim; d += LANES)
                vf_store(out[i] + d, vf_div(vf_load(out[i] + d), vf_set(sums[i])));
        }
    }
}
