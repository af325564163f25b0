/* Keyed digests of pages, and files they are written to, by a thread that everybody else comes
 * before: it works in the time that a step leaves a core idle. Whoever asks sleeps meanwhile, holds
 * no lock of Python's, and so can be held up by nobody's page. */
#include "quire_native.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

#define LOWEST 19  /* of a thread alone: a seventieth of a core that others want all of */
#define MOST 512   /* pieces of one call of the system, which takes 1024 */

typedef void (*work)(void *);

struct qn_scribe {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    work todo; /* NULL: nothing */
    void *arg;
    int is_busy;
};

static void *scribble(void *arg) {
    qn_scribe *scribe = arg;
#ifdef __linux__
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), LOWEST);
#endif
    pthread_mutex_lock(&scribe->lock);
    for (;;) {
        while (!scribe->todo) pthread_cond_wait(&scribe->changed, &scribe->lock);
        const work todo = scribe->todo;
        pthread_mutex_unlock(&scribe->lock);
        todo(scribe->arg);
        pthread_mutex_lock(&scribe->lock);
        scribe->todo = 0;
        pthread_cond_broadcast(&scribe->changed);
    }
    return 0; /* never: it lives as long as the process */
}

qn_scribe *qn_scribe_new(void) {
    qn_scribe *scribe = calloc(1, sizeof *scribe);
    pthread_t thread;
    if (!scribe) return 0;
    pthread_mutex_init(&scribe->lock, 0);
    pthread_cond_init(&scribe->changed, 0);
    if (pthread_create(&thread, 0, scribble, scribe)) {
        free(scribe);
        return 0;
    }
    pthread_detach(thread);
    return scribe;
}

static void have_done(qn_scribe *scribe, work todo, void *arg) {
    if (!scribe) { /* there is a hurry */
        todo(arg);
        return;
    }
    pthread_mutex_lock(&scribe->lock);
    while (scribe->is_busy) pthread_cond_wait(&scribe->changed, &scribe->lock);
    scribe->is_busy = 1;
    scribe->arg = arg;
    scribe->todo = todo;
    pthread_cond_broadcast(&scribe->changed);
    while (scribe->todo) pthread_cond_wait(&scribe->changed, &scribe->lock);
    scribe->is_busy = 0;
    pthread_cond_broadcast(&scribe->changed);
    pthread_mutex_unlock(&scribe->lock);
}

/* ---------------------------------------------------------------- files */

typedef struct {
    int fd;
    struct iovec *pieces;
    int64_t count, result;
} writing;

static void write_all(void *arg) {
    writing *job = arg;
    struct iovec *at = job->pieces, *end = at + job->count;
    while (at < end) {
        const int64_t some = end - at < MOST ? end - at : MOST;
        ssize_t done = writev(job->fd, at, (int)some);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) {
            job->result = -errno;
            return;
        }
        job->result += done;
        for (; at < end && (size_t)done >= at->iov_len; at++) done -= (ssize_t)at->iov_len;
        if (at < end) {
            at->iov_base = (char *)at->iov_base + done;
            at->iov_len -= (size_t)done;
        }
    }
}

int64_t qn_write(qn_scribe *scribe, int fd, struct iovec *pieces, int64_t count) {
    writing job = {fd, pieces, count, 0};
    have_done(scribe, write_all, &job);
    return job.result;
}

/* ---------------------------------------------------------------- digests */

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#define CHUNK 64 /* bytes that SHA-256 takes at a time */

typedef struct {
    uint32_t words[8];
    uint8_t rest[CHUNK];
    uint64_t length;
} sha256;

/* The registers of the instructions hold ABEF and CDGH of FIPS 180-4's eight words. */
__attribute__((target("sha,sse4.1"))) static void add_blocks(sha256 *to, const uint8_t *data,
                                                             uint64_t count) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i low = _mm_loadu_si128((const __m128i *)to->words);
    const __m128i high = _mm_loadu_si128((const __m128i *)(to->words + 4));
    const __m128i badc = _mm_shuffle_epi32(low, 0xb1), hgfe = _mm_shuffle_epi32(high, 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);
    for (; count; count--, data += CHUNK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 16; i++) {
            __m128i *at = &w[i % 4];
            if (i < 4) {
                *at = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), swap);
            } else {
                const __m128i last = w[(i + 3) % 4];
                *at = _mm_sha256msg1_epu32(*at, w[(i + 1) % 4]);
                *at = _mm_add_epi32(*at, _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
                *at = _mm_sha256msg2_epu32(*at, last);
            }
            const __m128i m = _mm_add_epi32(*at, _mm_loadu_si128((const __m128i *)(K + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, m);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(m, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)to->words, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(to->words + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static void begin(sha256 *to) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(to->words, start, sizeof start);
    to->length = 0;
}

static void add(sha256 *to, const uint8_t *data, uint64_t size) {
    const uint64_t kept = to->length % CHUNK;
    to->length += size;
    if (kept) {
        const uint64_t some = size < CHUNK - kept ? size : CHUNK - kept;
        memcpy(to->rest + kept, data, some);
        data += some, size -= some;
        if (kept + some < CHUNK) return;
        add_blocks(to, to->rest, 1);
    }
    add_blocks(to, data, size / CHUNK);
    if (size % CHUNK) memcpy(to->rest, data + size / CHUNK * CHUNK, size % CHUNK);
}

static void end(sha256 *to, uint8_t out[32]) {
    const uint64_t bits = to->length * 8;
    uint8_t tail[CHUNK + 8] = {0x80};
    const uint64_t zeros = (2 * CHUNK - 8 - to->length % CHUNK - 1) % CHUNK; /* after the 0x80 */
    for (int i = 0; i < 8; i++) tail[1 + zeros + i] = (uint8_t)(bits >> (56 - 8 * i));
    add(to, tail, 1 + zeros + 8);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(to->words[i / 4] >> (24 - 8 * (i % 4)));
}

typedef struct {
    const uint8_t *pads;
    const struct iovec *pieces;
    int64_t per_record, count;
    uint8_t *out;
} sealing;

static void seal_all(void *arg) {
    const sealing *job = arg;
    const struct iovec *piece = job->pieces;
    for (int64_t record = 0; record < job->count; record++) {
        uint8_t *out = job->out + 32 * record;
        sha256 made;
        begin(&made);
        add(&made, job->pads, CHUNK);
        for (int64_t i = 0; i < job->per_record; i++, piece++)
            add(&made, piece->iov_base, piece->iov_len);
        end(&made, out);
        begin(&made);
        add(&made, job->pads + CHUNK, CHUNK);
        add(&made, out, 32);
        end(&made, out);
    }
}

int qn_can_seal(void) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c >> 19 & 1)) return 0; /* SSE 4.1 */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

int qn_seal(qn_scribe *scribe, const uint8_t *pads, const struct iovec *pieces, int64_t per_record,
            int64_t count, uint8_t *out) {
    sealing job = {pads, pieces, per_record, count, out};
    have_done(scribe, seal_all, &job);
    return 1;
}
#else
int qn_can_seal(void) { return 0; }

int qn_seal(qn_scribe *scribe, const uint8_t *pads, const struct iovec *pieces, int64_t per_record,
            int64_t count, uint8_t *out) {
    (void)scribe, (void)pads, (void)pieces, (void)per_record, (void)count, (void)out;
    return 0;
}
#endif
