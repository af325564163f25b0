/* Where a token's keys and values lie in a layer's cache: see qn_heads. */
#ifndef QUIRE_CACHE_H
#define QUIRE_CACHE_H

#include "quire_native.h"

typedef struct {
    int run, runs_each; /* tokens of a run, runs of a page */
} layout;

static inline layout layout_of(const qn_step *step) {
    const int run = step->page_size < RUN ? step->page_size : RUN;
    return (layout){run, step->page_size / run};
}

/* Where a run starts in keys and in values, in numbers. */
static inline int64_t place_of(const qn_heads *h, layout l, int64_t page, int run, int kv_head) {
    return ((page * h->num_kv_heads + kv_head) * l.runs_each + run) * l.run * h->head_dim;
}

#endif
