/* Every kernel on every instruction set of this CPU, on fixed numbers: results must be plain C's.
 *
 * Prints the sets, then a digest of each result, which must be the same on every architecture. A
 * result that is no number is compared as such: its sign and payload are the CPU's own choice.
 * Exits with 1 and says where, if a set differs from plain C.
 */
#include "quire_native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SETS 8
#define ROWS 40     /* the most rows of a product */
#define MAX_FED 17  /* rows up to which every number of rows is tried */

static const char *sets[MAX_SETS];
static int num_sets, num_wrong;
static qn_pool *alone, *three;

/* ------------------------------------------------------------------ numbers */

static uint64_t state = 1;

static uint32_t draw(void) { /* xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)(state * 2685821657736338717ull >> 32);
}

static float of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static float uniform(void) { return (float)((int32_t)draw() >> 8) / 8388608.0f; } /* [-1, 1) */

static uint16_t half_of(void) { return (uint16_t)((draw() & 0x83ff) | (4 + draw() % 8) << 10); }

static void *room(size_t bytes) {
    void *p = calloc(bytes + 64, 1);
    if (!p) abort();
    return p;
}

static float *floats(int64_t count) {
    float *p = room((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) p[i] = uniform();
    return p;
}

/* Puts what is easily treated differently into some rows: NaN, infinities, denormals, zeros. */
static void spoil(float *x, int64_t rows, int64_t width) {
    static const uint32_t ODD[] = {0x7fc00000, 0x7f800000, 0xff800000, 0x00000001, 0x80000000,
                                   0x7f7fffff, 0xff7fffff, 0x007fffff, 0x4f000000, 0xcf000001};
    for (int64_t row = 2; row < rows; row += 3)
        for (int64_t i = 0; i < width; i += row % 2 ? 1 + width / 3 : 1) {
            if (row % 4 < 2) x[row * width + i] = of_bits(ODD[(row / 3 + i) % 10]);
            else x[row * width + i] *= of_bits((uint32_t)(row % 8 < 4 ? 1 : 240) << 23);
        }
}

static uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return f != f ? 0x7fc00000 : bits;
}

static void digest(const char *what, const float *x, int64_t count) {
    uint64_t hash = 14695981039346656037ull;
    for (int64_t i = 0; i < count; i++) hash = (hash ^ bits_of(x[i])) * 1099511628211ull;
    printf("%s %016llx\n", what, (unsigned long long)hash);
}

static void compare(const char *what, const char *set, int rows, const float *got,
                    const float *want, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (bits_of(got[i]) != bits_of(want[i])) {
            printf("WRONG %s, %s, %d rows: [%lld] is %a, plain C has %a\n", what, set, rows,
                   (long long)i, (double)got[i], (double)want[i]);
            num_wrong++;
            return;
        }
}

/* ------------------------------------------------------------------ products */

typedef struct {
    const char *name;
    int bits, block, has_offset, scale_kind, zero;
    int is_one_plane; /* inputs of one int8 */
} form;

static const form FORMS[] = {
    {"2 bits", 2, 32, 0, SCALES_HALF, 1},
    {"2 bits, one plane", 2, 32, 0, SCALES_HALF, 1, 1},
    {"2 bits, offsets, two levels", 2, 16, 1, SCALES_U8, 0},
    {"4 bits in 16", 4, 16, 0, SCALES_S8, 4},
    {"4 bits", 4, 32, 0, SCALES_HALF, 8},
    {"4 bits, fp32 scales", 4, 32, 0, SCALES_FLOAT, 8},
    {"4 bits, offsets", 4, 32, 1, SCALES_HALF, 0},
    {"4 bits, offsets, two levels", 4, 32, 1, SCALES_U8, 0},
    {"4 bits, one plane", 4, 32, 0, SCALES_HALF, 8, 1},
    {"5 bits", 5, 32, 0, SCALES_HALF, 16},
    {"5 bits, offsets", 5, 32, 1, SCALES_HALF, 0},
    {"6 bits", 6, 16, 0, SCALES_S8, 32},
    {"8 bits", 8, 32, 0, SCALES_HALF, 0},
    {"8 bits, one plane", 8, 32, 0, SCALES_HALF, 0, 1},
    {"table", CODES_TABLE4, 32, 0, SCALES_HALF, 0},
    {"table, powers", CODES_TABLE4, 32, 0, SCALES_POWER, 0},
    {"fp32", CODES_FLOAT32, 1, 0, SCALES_FLOAT, 0},
    {"fp16", CODES_FLOAT16, 1, 0, SCALES_FLOAT, 0},
    {"bf16", CODES_BFLOAT16, 1, 0, SCALES_FLOAT, 0},
    {"e4m3", CODES_E4M3, 1, 0, SCALES_FLOAT, 0},
    {"e4m3, a scale a panel", CODES_E4M3, 1, 0, SCALES_PANEL, 0},
    {"e5m2", CODES_E5M2, 1, 0, SCALES_FLOAT, 0},
    {"16 values", CODES_VALUES4, 1, 0, SCALES_FLOAT, 0},
    {"fp16 2:4", CODES_HALF24, 1, 0, SCALES_FLOAT, 0},
    {"bf16 2:4", CODES_BFLOAT24, 1, 0, SCALES_FLOAT, 0},
};
static const int SHAPES[][2] = {{16, 32}, {33, 96}, {72, 192}};

static uint8_t *bytes(int64_t count) {
    uint8_t *p = room((size_t)count);
    for (int64_t i = 0; i < count; i++) p[i] = (uint8_t)draw();
    return p;
}

static uint16_t *halves(int64_t count) {
    uint16_t *p = room((size_t)count * 2);
    for (int64_t i = 0; i < count; i++) p[i] = half_of();
    for (int64_t i = 5; i < count; i += 29) p[i] &= 0x83ff; /* denormals */
    return p;
}

static uint8_t *scales_of(int kind, int64_t count) {
    if (kind == SCALES_HALF) return (uint8_t *)halves(count);
    if (kind == SCALES_FLOAT) return (uint8_t *)floats(count);
    uint8_t *p = bytes(count);
    for (int64_t i = 0; kind == SCALES_POWER && i < count; i++)
        p[i] = (uint8_t)(i % 31 == 0 ? i % 3 : 110 + p[i] % 25);
    return p;
}

static qn_weight weight_of(const form *f, int num_out, int num_in) {
    const int64_t height = (num_out + PANEL - 1) / PANEL * PANEL, size = height * num_in;
    qn_weight w = {.num_out = num_out, .num_in = num_in, .bits = f->bits, .block = f->block,
                   .zero = f->zero, .scale_kind = f->scale_kind,
                   .planes = f->is_one_plane ? 1 : 2};
    w.bias = num_out % 2 ? floats(height) : 0;
    if (f->bits >= CODES_HALF24) { /* 144 bytes for 8 inputs of a panel, the last 16 of them places */
        uint8_t *codes = (uint8_t *)halves(size * 9 / 16);
        for (int64_t at = 128; at < size * 9 / 8; at += 144)
            for (int i = 0; i < PANEL; i++) codes[at + i] = (uint8_t)(0x49 + 0x44 * (draw() % 3));
        w.codes = codes;
        return w;
    }
    if (f->bits >= CODES_E4M3) { /* groups of 24 inputs, the last one smaller */
        uint8_t *codes = bytes(size);
        for (int64_t i = 0; f->bits == CODES_E4M3 && i < size; i++) /* no NaN */
            if ((codes[i] & 0x7f) == 0x7f) codes[i] ^= 1;
        for (int64_t i = 0; f->bits == CODES_E5M2 && i < size; i++) /* nor infinities */
            if ((codes[i] & 0x7c) == 0x7c) codes[i] ^= 0x40;
        w.codes = codes;
        w.share = 24;
        w.scales = (uint8_t *)floats(height * ((num_in + 23) / 24));
        w.table = (int8_t *)floats(16);
        return w;
    }
    if (f->bits >= 100) {
        if (f->bits == CODES_FLOAT32) w.codes = (uint8_t *)floats(size);
        else w.codes = (uint8_t *)halves(size); /* small numbers as bf16 too */
        return w;
    }
    const int blocks = num_in / f->block;
    w.share = 1;
    w.super = blocks % 2 ? 1 : 2;
    w.codes = bytes(size * (f->bits == CODES_TABLE4 ? 4 : f->bits) / 8);
    w.table = (int8_t *)bytes(height * 4); /* every four outputs have their own */
    w.scales = scales_of(f->scale_kind, height * blocks);
    w.super_scales = halves(height * blocks / w.super);
    if (f->has_offset) {
        w.offsets = scales_of(f->scale_kind, height * blocks);
        w.super_offsets = halves(height * blocks / w.super);
    }
    return w;
}

static void check_product(const form *f, int num_out, int num_in) {
    char what[80];
    snprintf(what, sizeof what, "%s %dx%d", f->name, num_out, num_in);
    const qn_weight w = weight_of(f, num_out, num_in);
    float *x = floats(ROWS * num_in);
    spoil(x, ROWS, num_in);
    void *scratch = room((size_t)qn_scratch_bytes(&w, ROWS));
    float *want = room((size_t)ROWS * num_out * 4), *got = room((size_t)ROWS * num_out * 4);
    float *weights = room((size_t)num_out * num_in * 4);
    float *own = room((size_t)num_out * num_in * 4);
    int64_t *ids = room((size_t)num_out * 8);
    for (int i = 0; i < num_out; i++) ids[i] = num_out - 1 - i;
    qn_use_isa("plain");
    qn_product(alone, &w, x, num_in, ROWS, want, num_out, scratch);
    qn_rows(&w, ids, num_out, weights);
    digest(what, want, (int64_t)ROWS * num_out);
    digest("  its rows", weights, (int64_t)num_out * num_in);
    for (int s = 0; s < num_sets; s++) {
        qn_use_isa(sets[s]);
        qn_rows(&w, ids, num_out, own);
        compare("rows of a weight", sets[s], num_out, own, weights, (int64_t)num_out * num_in);
        for (int n = 1; n <= MAX_FED + 1; n++) {
            const int rows = n > MAX_FED ? ROWS : n, first = n % 2 ? ROWS - rows : 0;
            memset(got, 0, (size_t)ROWS * num_out * 4);
            qn_product(n > MAX_FED ? three : alone, &w, x + first * num_in, num_in, rows, got,
                       num_out, scratch);
            compare(what, sets[s], rows, got, want + first * num_out, (int64_t)rows * num_out);
        }
    }
}

/* ------------------------------------------------------------------ rows */

#define TOKENS 53
#define WIDTH 96

/* One operation on every set; `size` floats of its result and of its sum. */
static void check_op(const char *what, qn_op op, const qn_step *step, int64_t size) {
    float *out = room((size_t)size * 4), *sum = room((size_t)size * 4);
    float *want = room((size_t)size * 4), *want_sum = room((size_t)size * 4);
    for (int s = -1; s < num_sets; s++) {
        qn_use_isa(s < 0 ? "plain" : sets[s]);
        op.out = s < 0 ? want : out;
        op.sum = s < 0 ? want_sum : sum;
        qn_run(alone, &op, 1, step, 0);
        if (s < 0) digest(what, want, size);
        else {
            compare(what, sets[s], TOKENS, out, want, size);
            compare(what, sets[s], TOKENS, sum, want_sum, size);
        }
    }
}

static void check_ops(void) {
    const qn_step step = {.num_tokens = TOKENS};
    float *x = floats(2 * TOKENS * WIDTH), *y = floats(TOKENS * WIDTH), *weight = floats(WIDTH);
    spoil(x, TOKENS, 2 * WIDTH);
    spoil(y, TOKENS, WIDTH);
    const int64_t size = TOKENS * WIDTH;
    qn_op op = {.x = x, .weight = weight, .width = WIDTH, .eps = 1e-5f};
    op.kind = OP_NORM;
    check_op("norm", op, &step, size);
    op.y = y;
    check_op("norm of a sum", op, &step, size);
    op.bias = floats(WIDTH);
    check_op("layer norm of a sum", op, &step, size);
    op.bias = 0;
    op.kind = OP_SCALE;
    op.eps = 0.37f;
    check_op("scale and add", op, &step, size);
    op.kind = OP_GATE;
    for (int i = 0; i < TOKENS * WIDTH; i += 2) x[i] *= 30.0f;
    op.limit = 3.0f;
    for (op.kind_of_gate = GATE_SILU; op.kind_of_gate <= GATE_CLAMPED; op.kind_of_gate++)
        check_op("gate", op, &step, size);
    op.kind = OP_ACTIVATE;
    for (op.kind_of_gate = GATE_SILU; op.kind_of_gate <= GATE_RELU2; op.kind_of_gate++)
        check_op("activation", op, &step, size);
    op.kind = OP_ROUND;
    op.eps = 1e-5f;
    check_op("rounded to steps", op, &step, size);
}

/* ------------------------------------------------------------------ experts */

#define EXPERTS 21
#define TOP 3
#define STRIDE 16 /* of visits */

/* Routing, then experts of both kinds: what the second reads are the first one's results. */
static float *visit_experts(const qn_route *route, const qn_experts *e, const float *logits,
                            const float *x, qn_pool *pool) {
    const int width = STRIDE + WIDTH;
    const qn_step step = {.num_tokens = TOKENS};
    float *weights = room((size_t)TOKENS * STRIDE * 4), *numbers = room((size_t)TOKENS * STRIDE * 4);
    float *answers = room((size_t)TOKENS * WIDTH * 4), *all = room((size_t)TOKENS * width * 4);
    void *scratch = room((size_t)qn_experts_bytes(e, TOKENS));
    const qn_op ops[] = {
        {.kind = OP_ROUTE, .x = logits, .x_stride = EXPERTS, .out = weights, .sum = numbers,
         .out_stride = STRIDE, .more = route},
        {.kind = OP_EXPERTS, .x = x, .y = weights, .weight = numbers, .x_stride = STRIDE,
         .out = answers, .more = e, .eps = 1.7f, .limit = 2.0f, .kind_of_gate = GATE_CLAMPED},
        {.kind = OP_ADD_GATED, .x = answers, .y = x, .weight = logits, .x_stride = EXPERTS,
         .out = answers, .width = WIDTH},
    };
    qn_run(pool, ops, 3, &step, scratch);
    for (int row = 0; row < TOKENS; row++) {
        memcpy(all + row * width, weights + row * STRIDE, STRIDE * 4);
        memcpy(all + row * width + STRIDE, answers + row * WIDTH, WIDTH * 4);
    }
    free(weights), free(numbers), free(answers), free(scratch);
    return all;
}

static void check_experts(const form *f, int is_sigmoid) {
    char what[80];
    snprintf(what, sizeof what, "experts of %s%s", f->name, is_sigmoid ? ", sigmoid" : "");
    qn_weight weights[2 * EXPERTS];
    const qn_weight *up[EXPERTS], *down[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
        weights[2 * i] = weight_of(f, 2 * 32, WIDTH);
        weights[2 * i + 1] = weight_of(f, WIDTH, 32);
        up[i] = &weights[2 * i], down[i] = &weights[2 * i + 1];
    }
    const qn_route route = {.num_experts = EXPERTS, .top_k = TOP, .num_groups = 7, .top_groups = 3,
                            .group_best = 2, .is_sigmoid = is_sigmoid, .normalizes = 1,
                            .scale = 1.5f, .correction = is_sigmoid ? floats(EXPERTS) : 0};
    const qn_experts e = {up, down, 0, EXPERTS, TOP, 1, WIDTH, 32};
    float *logits = floats(TOKENS * EXPERTS), *x = floats(TOKENS * WIDTH);
    for (int i = 0; i < TOKENS * EXPERTS; i++) logits[i] *= 9.0f;
    spoil(logits, TOKENS, EXPERTS);
    spoil(x, TOKENS / 2, WIDTH);
    const int64_t size = TOKENS * (STRIDE + WIDTH);
    qn_use_isa("plain");
    float *want = visit_experts(&route, &e, logits, x, alone);
    digest(what, want, size);
    for (int s = 0; s < num_sets; s++) {
        qn_use_isa(sets[s]);
        float *got = visit_experts(&route, &e, logits, x, three);
        compare(what, sets[s], TOKENS, got, want, size);
        free(got);
    }
}

/* ------------------------------------------------------------------ attention */

#define PAGE 16
#define PAGES 8 /* of a sequence */
#define SEQS 2

typedef struct {
    const char *name;
    int heads, kv_heads, dim, rotated, window, has_norms, has_sinks, form;
    float softcap;
} kind;

static const kind KINDS[] = {
    {"attention", 4, 2, 32, 32, 0, 0, 0, 0, 0.0f},
    {"attention, window, sinks", 3, 1, 16, 8, 21, 0, 1, 0, 0.0f},
    {"attention, cap, norms", 9, 3, 64, 64, 0, 1, 0, 0, 5.0f},
    {"attention, fp16 cache", 4, 2, 32, 32, 0, 0, 0, CACHE_HALF, 0.0f},
    {"attention, int8 cache", 4, 2, 48, 32, 0, 0, 0, CACHE_INT8, 0.0f},
    {"attention, fp8 cache, cap", 3, 1, 80, 8, 0, 0, 0, CACHE_FP8, 5.0f},
    {"attention, int4 cache, window, sinks", 6, 2, 96, 64, 21, 0, 1, CACHE_INT4, 0.0f},
};

/* Both sequences in two steps: most of the prompts, then three tokens and one. */
static float *attend_twice(const kind *k, qn_heads h, const float *qkv) {
    static const int FED[2][SEQS] = {{61, 40}, {3, 1}};
    const int width = k->heads * k->dim, stride = width + 2 * k->kv_heads * k->dim;
    const size_t cache = (size_t)SEQS * PAGES * PAGE * k->kv_heads * k->dim * 4;
    float *q = room((size_t)101 * width * 4), *out = room((size_t)105 * width * 4);
    int32_t table[SEQS * PAGES], starts[SEQS + 1] = {0}, lens[SEQS] = {0}, rows[SEQS] = {0, 1};
    for (int i = 0; i < SEQS * PAGES; i++) table[i] = i * 7 % (SEQS * PAGES);
    h.keys = room(cache);
    h.values = room(cache);
    h.page_stride = (int64_t)PAGE * k->kv_heads * k->dim * 4; /* enough for any form */
    int64_t positions[101], slots[101], done = 0;
    for (int part = 0; part < 2; part++) {
        int64_t token = 0;
        for (int seq = 0; seq < SEQS; seq++) {
            for (int i = 0; i < FED[part][seq]; i++, token++) {
                positions[token] = lens[seq] + i;
                slots[token] = table[seq * PAGES + positions[token] / PAGE] * PAGE +
                               positions[token] % PAGE;
            }
            lens[seq] += FED[part][seq];
            starts[seq + 1] = (int32_t)token;
        }
        const int64_t *all_slots[] = {slots};
        const int32_t *tables[] = {table};
        const qn_step step = {.positions = positions, .slots = all_slots, .tables = tables,
                              .query_starts = starts, .context_lens = lens, .rows = rows,
                              .num_tokens = token, .num_seqs = SEQS, .table_stride = PAGES,
                              .page_size = PAGE};
        const qn_op ops[] = {
            {.kind = OP_STORE, .x = qkv + done * stride, .out = q, .heads = &h, .width = stride},
            {.kind = OP_ATTEND, .x = q, .out = out + done * width, .heads = &h, .width = width},
        };
        qn_run(alone, ops, 2, &step, 0);
        done += token;
    }
    free(h.keys);
    free(h.values);
    free(q);
    return out;
}

static void check_attention(const kind *k, int is_odd) {
    char what[80];
    snprintf(what, sizeof what, "%s%s", k->name, is_odd ? ", odd numbers" : "");
    const int stride = (k->heads + 2 * k->kv_heads) * k->dim;
    qn_heads h = {.num_heads = k->heads, .num_kv_heads = k->kv_heads, .head_dim = k->dim,
                  .rotated = k->rotated, .form = k->form, .turned = k->form == CACHE_INT4 ? 32 : 1, .window = k->window,
                  .softcap = k->softcap, .scale = 0.31f, .norm_eps = 1e-6f};
    h.cos = floats(PAGES * PAGE * k->rotated);
    h.sin = floats(PAGES * PAGE * k->rotated);
    if (k->has_norms) h.q_norm = floats(k->dim), h.k_norm = floats(k->dim);
    if (k->has_sinks) h.sinks = floats(k->heads);
    if (k->form == CACHE_INT4)
        h.offsets = floats(k->kv_heads * k->dim), h.factors = floats(k->kv_heads * k->dim);
    float *qkv = floats(105 * stride);
    if (is_odd) spoil(qkv + 50 * stride, 55, stride); /* the first rows are sound */
    const int64_t size = (int64_t)105 * k->heads * k->dim;
    qn_use_isa("plain");
    float *want = attend_twice(k, h, qkv);
    digest(what, want, size);
    for (int s = 0; s < num_sets; s++) {
        qn_use_isa(sets[s]);
        float *got = attend_twice(k, h, qkv);
        compare(what, sets[s], 105, got, want, size);
        free(got);
    }
}

/* ------------------------------------------------------------------ latents */

#define LATENT_HEADS 6
#define RANK 48
#define ROPE 16
#define PLAIN_DIM 16

/* A prompt of several spans, then a token more; the results of both. */
static float *attend_latents(qn_latents l, const float *tokens, qn_pool *pool) {
    const int wide = PLAIN_DIM + ROPE, width = LATENT_HEADS * wide, stride = width + RANK + ROPE;
    const int most = SEQS * PAGES * PAGE - 8, out_width = LATENT_HEADS * RANK;
    float *turned = room((size_t)most * width * 4), *latents = room((size_t)most * RANK * 4);
    float *q = room((size_t)most * LATENT_HEADS * (RANK + ROPE) * 4);
    float *out = room((size_t)most * out_width * 4);
    int32_t table[SEQS * PAGES], starts[2] = {0}, lens[1] = {0}, rows[1] = {0};
    int64_t positions[SEQS * PAGES * PAGE], slots[SEQS * PAGES * PAGE];
    for (int i = 0; i < SEQS * PAGES; i++) table[i] = i * 7 % (SEQS * PAGES);
    for (int i = 0; i < most; i++) memcpy(latents + i * RANK, tokens + i * stride + width, RANK * 4);
    const qn_heads dealt = {.num_heads = LATENT_HEADS, .num_kv_heads = l.shares, .head_dim = RANK};
    l.cache = room((size_t)SEQS * PAGES * PAGE * (RANK + ROPE) * 4);
    for (int done = 0; done < most; done = lens[0]) {
        const int fed = done ? 1 : most - 1;
        for (int i = 0; i < fed; i++) {
            positions[i] = done + i;
            slots[i] = table[positions[i] / PAGE] * PAGE + positions[i] % PAGE;
        }
        lens[0] = done + fed, starts[1] = fed;
        const int64_t *all_slots[] = {slots};
        const int32_t *tables[] = {table};
        const qn_step step = {.positions = positions, .slots = all_slots, .tables = tables,
                              .query_starts = starts, .context_lens = lens, .rows = rows,
                              .num_tokens = fed, .num_seqs = 1, .table_stride = SEQS * PAGES,
                              .page_size = PAGE};
        const float *from = tokens + done * stride;
        const qn_op store = {.kind = OP_STORE_LATENTS, .x = from, .x_stride = stride,
                             .out = turned + done * width, .y = latents + done * RANK,
                             .weight = from + width + RANK, .out_stride = stride, .more = &l};
        qn_run(pool, &store, 1, &step, 0);
        for (int i = done * LATENT_HEADS; i < lens[0] * LATENT_HEADS; i++) { /* made wider */
            memcpy(q + i * (RANK + ROPE), turned + i * wide, PLAIN_DIM * 4);
            memcpy(q + i * (RANK + ROPE) + RANK, turned + i * wide + PLAIN_DIM, ROPE * 4);
        }
        const qn_op attend = {.kind = OP_ATTEND_LATENTS,
                              .x = q + done * LATENT_HEADS * (RANK + ROPE),
                              .out = out + done * out_width, .heads = &dealt, .more = &l};
        qn_run(pool, &attend, 1, &step, 0);
    }
    free(l.cache), free(turned), free(latents), free(q);
    return out;
}

static void check_latents(int is_half, int is_odd) {
    char what[80];
    snprintf(what, sizeof what, "latents%s%s", is_half ? ", fp16" : "", is_odd ? ", odd" : "");
    const int most = SEQS * PAGES * PAGE - 8;
    const int stride = LATENT_HEADS * (PLAIN_DIM + ROPE) + RANK + ROPE;
    const qn_latents l = {.num_heads = LATENT_HEADS, .shares = 2, .rank = RANK, .rope = ROPE,
                          .plain = PLAIN_DIM, .is_half = is_half, .scale = 0.31f,
                          .cos = floats(SEQS * PAGES * PAGE * ROPE),
                          .sin = floats(SEQS * PAGES * PAGE * ROPE)};
    float *tokens = floats(most * stride);
    if (is_odd) spoil(tokens + 150 * stride, most - 150, stride); /* the first rows are sound */
    const int64_t size = (int64_t)most * LATENT_HEADS * RANK;
    qn_use_isa("plain");
    float *want = attend_latents(l, tokens, alone);
    digest(what, want, size);
    for (int s = 0; s < num_sets; s++) {
        qn_use_isa(sets[s]);
        float *got = attend_latents(l, tokens, three);
        compare(what, sets[s], most, got, want, size);
        free(got);
    }
}

int main(void) {
    alone = qn_pool_new(1);
    three = qn_pool_new(3);
    printf("sets");
    for (const char *name; num_sets < MAX_SETS && (name = qn_isa_name(num_sets)); num_sets++)
        printf(" %s", sets[num_sets] = name);
    printf("\n");
    for (unsigned f = 0; f < sizeof FORMS / sizeof *FORMS; f++)
        for (unsigned s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++)
            check_product(&FORMS[f], SHAPES[s][0], SHAPES[s][1]);
    check_ops();
    for (unsigned i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        for (int is_odd = 0; is_odd < 2; is_odd++) check_attention(&KINDS[i], is_odd);
    for (unsigned f = 3; f < sizeof FORMS / sizeof *FORMS; f += 7) /* 4 bits, 8 bits */
        for (int is_sigmoid = 0; is_sigmoid < 2; is_sigmoid++)
            check_experts(&FORMS[f], is_sigmoid);
    check_experts(&FORMS[sizeof FORMS / sizeof *FORMS - 3], 1); /* fp32 */
    for (int i = 0; i < 4; i++) check_latents(i % 2, i / 2);
    return num_wrong != 0;
}
