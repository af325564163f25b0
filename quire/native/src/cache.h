/* Where a token's keys and values lie in a layer's cache: see qn_heads. */
#ifndef QUIRE_CACHE_H
#define QUIRE_CACHE_H

#include "quire_native.h"

typedef struct {
    int run, runs_each; /* tokens of a run, runs of a page */
    int head_bytes;     /* of a token's keys, or values, of a head; its scale left out */
    int64_t run_bytes;
} layout;

static inline int is_coded(const qn_heads *h) { return h->form >= CACHE_INT8; }

static inline layout layout_of(const qn_heads *h, const qn_step *step) {
    const int run = step->page_size < RUN ? step->page_size : RUN;
    const int bits = h->form == CACHE_FLOAT  ? 32
                     : h->form == CACHE_HALF ? 16
                     : h->form == CACHE_INT4 ? 4
                                             : 8;
    const int head_bytes = h->head_dim * bits / 8;
    const int64_t run_bytes = (int64_t)run * (head_bytes + (is_coded(h) ? 2 : 0));
    return (layout){run, step->page_size / run, head_bytes, run_bytes};
}

/* Where a run starts in keys and in values, in bytes. */
static inline int64_t place_of(const qn_heads *h, layout l, int64_t page, int run, int kv_head) {
    return page * h->page_stride + ((int64_t)kv_head * l.runs_each + run) * l.run_bytes;
}

/* Where its tokens' scales start, after their codes. */
static inline int64_t scales_after(layout l, int64_t place) {
    return place + (int64_t)l.run * l.head_bytes;
}

#endif
