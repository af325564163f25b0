/* The plain C interface: what crosses from Python, by address.
 *
 * A weight [outputs, inputs] is kept in panels of 16 outputs. Whole numbers (codes) lie so that a
 * vector holds four neighbouring inputs of 16 outputs; floats so that it holds one. A block is 32
 * (or 16) inputs, and `share` blocks are a group that shares a scale:
 * weight = scale * (code - zero) + offset.
 */
#ifndef QUIRE_NATIVE_H
#define QUIRE_NATIVE_H

#include <stdint.h>

#define PANEL 16
#define BLOCK 32 /* inputs whose products are summed in whole numbers, or half as many */

/* How codes are kept. The number of bits, except: */
enum { CODES_FLOAT32 = 100, CODES_FLOAT16 = 101, CODES_BFLOAT16 = 102, CODES_TABLE4 = 40 };
/* Floats with scales: an input of 16 outputs is 16 bytes; of 4 bits, two inputs are, the first one
 * low. `share` neighbouring inputs have one scale, the last ones maybe fewer. */
enum { CODES_E4M3 = 103, CODES_E5M2 = 104, CODES_VALUES4 = 105 };
/* Floats of 16 bits of which every four inputs keep two; sparse.h has the layout. */
enum { CODES_HALF24 = 106, CODES_BFLOAT24 = 107 };

/* How scales and offsets are kept, for each panel and group, 16 of them side by side. */
enum {
    SCALES_HALF = 0,  /* fp16 */
    SCALES_FLOAT = 1, /* fp32 */
    SCALES_U8 = 2,    /* uint8 times an fp16 for every `super` groups */
    SCALES_S8 = 3,    /* int8 times the same */
    SCALES_POWER = 4, /* uint8 e: 2^(e - 128), for tables of doubled values */
    SCALES_PANEL = 5, /* one fp32 for all 16, of floats with scales */
    SCALES_TIMES = 6, /* E4M3 without a sign, times an fp32 for a whole row */
    SCALES_OVER = 7,  /* the same over it */
    SCALES_PAIRS = 8, /* a scale below 16 and, in the high bits, an offset, as SCALES_U8 */
    SCALES_BFLOAT = 9 /* bf16 */
};

typedef struct {
    const uint8_t *codes;
    const uint8_t *scales;        /* [panels, groups, 16] */
    const uint8_t *offsets;       /* the same, added; NULL: none, or those of SCALES_PAIRS */
    const uint8_t *zeros;         /* the same, uint8, of 8 bits int8; NULL: `zero` for all */
    const uint16_t *super_scales; /* [panels, groups / super, 16] fp16; of SCALES_TIMES fp32, and of
                                     SCALES_OVER less than 0, before the reciprocals */
    const uint16_t *super_offsets;
    const float *bias;            /* [outputs rounded up to panels] or NULL */
    const int8_t *table;          /* of CODES_TABLE4: 16 values for every 4 outputs, [panels, 4, 16];
                                     of CODES_VALUES4: 16 floats */
    const int32_t *order;         /* [inputs] the input of each column, for OP_REORDER; or NULL */
    int32_t num_out, num_in;      /* num_in is a multiple of the block */
    int32_t bits, block, zero;
    int32_t scale_kind, super, share;
    int32_t planes;               /* int8 that an input is rounded to: 2, or 1 if trained so */
} qn_weight;

/* Of a row's activations when rounded, for each 32 inputs and in all; rounded.h has the layout. */
#define ROUNDED_BYTES 88
#define ROUNDED_ROW_BYTES(num_in) ((int64_t)(num_in) / BLOCK * ROUNDED_BYTES + 4)

/* ------------------------------------------------------------------ a step */

/* One step: who feeds what. Tokens lie end to end, sequence by sequence. */
typedef struct {
    const int64_t *ids, *positions;  /* [tokens] */
    const int64_t *const *slots;     /* by layer group, [tokens]: where keys and values go */
    const int32_t *const *tables;    /* by layer group, [table rows, table_stride] pages */
    const int32_t *query_starts;     /* [sequences + 1] */
    const int32_t *context_lens;     /* [sequences], the tokens fed now included */
    const int32_t *rows;             /* [sequences] rows of the tables */
    const int64_t *sample_index;     /* [samples] tokens whose rows are read at the end */
    const int32_t *sample_rows;      /* [samples] rows of the tables */
    int64_t num_tokens, num_seqs, num_samples, table_stride;
    int32_t page_size;
    const int32_t *adapters;         /* [tokens] slot of each token's adapter, 0: none; see OP_ADAPT */
    const int32_t *sample_adapters;  /* [samples] */
    const int32_t *paths;            /* [tokens, path_stride]; NULL: nobody feeds a tree of drafts */
    int64_t path_stride;
    const int32_t *stop;             /* not zero: the step shall be given up; NULL: nobody asks */
} qn_step;

/* A tree of drafts is a sequence whose drafts lie one behind the other in its slots, each at the
 * *place* that its turn gives it. A path is how many drafts a token sees, itself included, and
 * their places in the order of positions; -1 drafts: the token is of no tree. */

/* The attention of one layer.
 *
 * The cache of a page and a kv head is cut into runs of RUN tokens, or of a whole smaller page.
 * A run's keys lie with tokens as lanes, [head_dim, run], and its values as [run, head_dim]. Codes
 * are followed by the scales of the run's tokens, bf16. Two codes of 4 bits share a byte, the
 * first in its low half: of keys dimensions 2i and 2i + 1, of values dimensions i and i + 16 of 32.
 */
#define RUN 16
#define SPAN 128     /* positions whose keys are folded at a time; spans start at multiples of it */
#define MAX_HEAD 512 /* numbers of a head */
/* How the cache keeps numbers; cache_codes.h says what codes are. */
enum { CACHE_FLOAT, CACHE_HALF, CACHE_INT8, CACHE_FP8, CACHE_INT4 };

typedef struct {
    void *keys, *values;             /* [pages, kv heads, runs of a page, ...] */
    int64_t page_stride;             /* bytes from a page to the next */
    const float *cos, *sin;          /* [positions, rotated / 2]; NULL: no rotation */
    const float *q_norm, *k_norm;    /* [head_dim]; NULL: no norm */
    const float *offsets, *factors;  /* [kv heads, head_dim] of keys that become codes; or NULL */
    const float *sinks;              /* [heads] or NULL */
    int32_t num_heads, num_kv_heads, head_dim, rotated;
    int32_t window, group;           /* window 0: everything */
    int32_t form;                    /* of the cache */
    int32_t turned;                  /* numbers rotated together; 1: none */
    float scale, softcap, norm_eps;  /* softcap 0: none */
    float k_scale, v_scale;          /* of all codes; 0: each row has its own */
} qn_heads;

/* Neighbouring queries of one sequence: rows [row, row + count), the first at `position`. With
 * paths, keys up to `position` are everybody's, and those behind it each query's own. */
typedef struct {
    int64_t row;
    int32_t table_row, position, count;
    int32_t end;                     /* of the positions that any of them sees */
    const int32_t *paths;            /* of the first; NULL: no tree */
    int64_t path_stride;
} qn_queries;

/* How many positions a query sees, itself included. */
static inline int32_t qn_seen(const qn_queries *q, int query) {
    return q->position + 1 + (q->paths ? q->paths[query * q->path_stride] : query);
}

/* Attention of queries to one kv head, over spans [first, end) of their keys. */
typedef struct {
    qn_queries queries;
    int32_t kv_head, first, end;
    float *parts;     /* where each row's share of its one span goes; NULL: all spans, to the end */
    int32_t joint;    /* which units' parts are joined */
} qn_unit;

enum {
    OP_EMBED, OP_NORM, OP_PRODUCT, OP_STORE, OP_ATTEND, OP_GATE, OP_SCALE, OP_PICK,
    OP_ACTIVATE, OP_POSITIONS, OP_ROUND, OP_ROUTE, OP_EXPERTS, OP_ADD_GATED, OP_HEADS,
    OP_STORE_LATENTS, OP_ATTEND_LATENTS, OP_REORDER, OP_ADAPT
};
enum { GATE_SILU, GATE_GELU, GATE_RELU2, GATE_CLAMPED };

/* One operation on rows of floats; which fields it reads is said at its kernel. */
typedef struct {
    int32_t kind, of_samples;        /* rows are the step's samples, not its tokens */
    const float *x, *y;
    float *out, *sum;
    const float *weight;
    const qn_weight *product;
    const qn_heads *heads;
    int32_t width, out_stride, kind_of_gate;
    float eps;                       /* or the factor of OP_SCALE and OP_EMBED, alpha of a gate */
    const float *bias;
    int32_t x_stride;                /* between rows of x; 0: they follow one another */
    float limit;                     /* of GATE_CLAMPED */
    const void *more;                /* one of the records below */
} qn_op;

#define MAX_EXPERTS 1024
/* Which experts a token visits: the best, and with groups the best of the best groups. */
typedef struct {
    const float *correction;         /* [experts] added to decide who is best; NULL: nothing */
    int32_t num_experts, top_k, num_groups, top_groups, group_best;
    int32_t is_sigmoid, normalizes;
    float scale;
} qn_route;

/* A layer's experts. Parts of "up" give gate and up side by side. */
typedef struct {
    const qn_weight *const *up;      /* [experts, up_parts] */
    const qn_weight *const *down;    /* [experts] */
    int64_t *loads;                  /* [experts] visits so far, counted; NULL: not counted */
    int32_t num_experts, top_k, up_parts, hidden, ffn;
} qn_experts;

/* A weight of floats for each head; `rest` numbers behind a head's inputs are carried over. */
typedef struct {
    const qn_weight *const *weights; /* [heads], of one shape */
    int32_t num_heads, rest;
} qn_head_weights;

/* What one adapter adds to a product: of each part scale * B(A(x)), to some of its columns. */
typedef struct {
    const qn_weight *expand;         /* B, floats */
    int32_t column, input;           /* the first it adds to; the first of its share of A's results */
    float scale;
} qn_low_part;

typedef struct {
    const qn_weight *shrink;         /* A of all parts, one below the other */
    const qn_low_part *parts;
    int32_t num_parts;
} qn_low_rank;

typedef struct {
    const qn_low_rank *const *slots; /* by slot, from 1; NULL: that adapter adds nothing here */
    int32_t width, most_parts;       /* the most that A's of one adapter give */
} qn_adapters;

/* Latent attention of one layer. `heads` of the operation says how it is dealt out: each of its
 * kv heads is a share of the heads here, and a head has `rank` numbers. */
#define MAX_LATENT 1024 /* numbers of a row of the cache */
typedef struct {
    void *cache;                     /* [pages, tokens of a page, rank + rope] */
    const float *cos, *sin;          /* [positions, rope / 2] */
    int32_t num_heads, shares;
    int32_t rank, rope, plain;       /* a head of a query has plain + rope numbers */
    int32_t group, is_half;
    float scale;
} qn_latents;

typedef struct qn_pool qn_pool;

/* Lives as long as the process. */
qn_pool *qn_pool_new(int num_threads);
int qn_pool_threads(const qn_pool *pool);

/* Instruction sets: what this build and this CPU can run, best first; NULL past the end. */
const char *qn_isa_name(int index);
/* 1 if there is a kernel for a weight of this kind. */
int qn_can_multiply(const qn_weight *weight);
/* 0, or -1 when the name is unknown or this CPU cannot run it. */
int qn_use_isa(const char *name);

/* Rows of the weight itself, as floats: out [count, inputs]. */
void qn_rows(const qn_weight *weight, const int64_t *ids, int64_t count, float *out);

/* out [rows, outputs] = x [rows, inputs] @ weight.T + bias; scratch as qn_scratch_bytes says. */
int64_t qn_scratch_bytes(const qn_weight *weight, int64_t rows);
/* Scratch memory of a layer of experts. */
int64_t qn_experts_bytes(const qn_experts *experts, int64_t rows);
void qn_product(qn_pool *pool, const qn_weight *weight, const float *x, int64_t x_stride,
                int64_t rows, float *out, int64_t out_stride, void *scratch);


/* Memory that several processes have mapped: a mark of each, then two sets of slots. */
typedef struct {
    void *shared;
    int64_t slot_bytes;
    int32_t rank, size;
} qn_exchange;

/* Our rows of a turn, `bytes` each and `stride` bytes apart. */
void qn_put(const qn_exchange *exchange, int64_t turn, const void *rows, int64_t count,
            int64_t bytes, int64_t stride);
/* Those of a rank, once they are there; 0 if they are not within the time. */
int qn_take(const qn_exchange *exchange, int64_t turn, int rank, void *rows, int64_t count,
            int64_t bytes, int64_t stride, double wait_s);

/* Digests and files, by a thread of the lowest priority; it lives as long as the process. Without
 * one (NULL) the caller does the work. */
struct iovec;
typedef struct qn_scribe qn_scribe;
qn_scribe *qn_scribe_new(void);
/* Whether this CPU has instructions for it. */
int qn_can_seal(void);
/* HMAC-SHA256 of records that consist of so many pieces each: out [records, 32]. `pads` are the two
 * blocks that the key makes, inner and outer. */
int qn_seal(qn_scribe *scribe, const uint8_t *pads, const struct iovec *pieces, int64_t per_record,
            int64_t count, uint8_t *out);
/* All pieces where the file stands; changes `pieces`. Bytes written, or minus the error's number. */
int64_t qn_write(qn_scribe *scribe, int fd, struct iovec *pieces, int64_t count);

/* A list of operations, one after the other. 1: the step was given up before the end. */
int qn_run(qn_pool *pool, const qn_op *ops, int64_t num_ops, const qn_step *step, void *scratch);

#endif
