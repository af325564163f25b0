/* Vault: memory of a GPU that can be left and taken again at the same addresses.

   A segment is a reserved range of addresses and, while it is mapped, the memory behind it. torch
   asks for segments through `qv_alloc` (a pluggable allocator); each belongs to the tag that the
   asking thread has set. `qv_drop` gives a tag's memory back and keeps the addresses, `qv_map` puts
   new memory behind them, all of it or none. The driver is found at run time, so this compiles
   where there is no CUDA. `quire/memory/vault.py` calls it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

/* Of cuda.h, as far as we need it. */
typedef int Result; /* 0: it worked */
typedef unsigned long long Address, Handle;
typedef void *Stream;
typedef struct {
    int type, id;
} Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *of_windows;
    unsigned char flags[8];
} Properties;
typedef struct {
    Location location;
    int flags;
} Access;
enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, NOT_INITIALIZED = 3 };

#define DRIVER(X)                                                                                  \
    X(Result, cuGetErrorString, (Result, const char **))                                           \
    X(Result, cuMemGetAllocationGranularity, (size_t *, const Properties *, int))                  \
    X(Result, cuMemAddressReserve, (Address *, size_t, size_t, Address, unsigned long long))       \
    X(Result, cuMemAddressFree, (Address, size_t))                                                 \
    X(Result, cuMemCreate, (Handle *, size_t, const Properties *, unsigned long long))             \
    X(Result, cuMemRelease, (Handle))                                                              \
    X(Result, cuMemMap, (Address, size_t, size_t, Handle, unsigned long long))                     \
    X(Result, cuMemUnmap, (Address, size_t))                                                       \
    X(Result, cuMemSetAccess, (Address, size_t, const Access *, size_t))                           \
    X(Result, cuCtxSynchronize, (void))                                                            \
    X(Result, cuMemcpyDtoHAsync_v2, (void *, Address, size_t, Stream))                             \
    X(Result, cuMemcpyHtoDAsync_v2, (Address, const void *, size_t, Stream))                       \
    X(Result, cuMemsetD32Async, (Address, unsigned, size_t, Stream))                               \
    X(Result, cuMemHostAlloc, (void **, size_t, unsigned))                                         \
    X(Result, cuMemFreeHost, (void *))

#define DECLARE(R, name, args) static R(*name) args;
DRIVER(DECLARE)

typedef struct Segment {
    struct Segment *next;
    Address at;
    size_t size;
    int device, tag, is_mapped;
    Handle memory;
} Segment;

static Segment *segments; /* newest last: a tag's bytes follow one another in this order */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int current_tag = -1;
static int is_open;

/* Find the driver. Returns the name of what is missing; NULL: nothing. */
const char *qv_open(const char *library) {
    void *driver = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    if (!driver) return library;
#define FIND(R, name, args)                                                                        \
    if (!(*(void **)&name = dlsym(driver, #name))) return #name;
    DRIVER(FIND)
    is_open = 1;
    return NULL;
}

const char *qv_error(Result result) {
    const char *text = NULL;
    if (is_open) cuGetErrorString(result, &text);
    return text ? text : "unknown error";
}

/* Segments that this thread asks for from now on; -1: none are given. */
void qv_tag(int tag) { current_tag = tag; }

static Properties properties_on(int device) {
    Properties made = {.type = PINNED, .location = {ON_DEVICE, device}};
    return made;
}

static Result map(Segment *one) {
    Properties wanted = properties_on(one->device);
    Access access = {{ON_DEVICE, one->device}, READ_WRITE};
    Result result = cuMemCreate(&one->memory, one->size, &wanted, 0);
    if (result) return result;
    if (!(result = cuMemMap(one->at, one->size, 0, one->memory, 0))) {
        if (!(result = cuMemSetAccess(one->at, one->size, &access, 1))) {
            one->is_mapped = 1;
            return 0;
        }
        cuMemUnmap(one->at, one->size);
    }
    cuMemRelease(one->memory);
    return result;
}

static Result unmap(Segment *one) {
    Result result = cuMemUnmap(one->at, one->size);
    if (result) return result;
    one->is_mapped = 0;
    return cuMemRelease(one->memory);
}

/* ------------------------------------------------------------ what torch calls */

void *qv_alloc(ssize_t size, int device, Stream stream) {
    (void)stream;
    if (!is_open || current_tag < 0 || size <= 0) return NULL;
    Properties wanted = properties_on(device);
    size_t grain = 0;
    if (cuMemGetAllocationGranularity(&grain, &wanted, 0) || !grain) return NULL;
    Segment *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->size = ((size_t)size + grain - 1) / grain * grain;
    made->device = device;
    made->tag = current_tag;
    if (cuMemAddressReserve(&made->at, made->size, 0, 0, 0)) {
        free(made);
        return NULL;
    }
    if (map(made)) {
        cuMemAddressFree(made->at, made->size);
        free(made);
        return NULL;
    }
    pthread_mutex_lock(&lock);
    Segment **end = &segments;
    while (*end) end = &(*end)->next;
    *end = made;
    pthread_mutex_unlock(&lock);
    return (void *)(uintptr_t)made->at;
}

void qv_free(void *pointer, size_t size, int device, Stream stream) {
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    Segment **at = &segments;
    while (*at && (*at)->at != (Address)(uintptr_t)pointer) at = &(*at)->next;
    Segment *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&lock);
    if (!found) return;
    if (found->is_mapped) {
        cuCtxSynchronize(); /* cudaFree would; kernels launched before may still read it */
        unmap(found);
    }
    cuMemAddressFree(found->at, found->size);
    free(found);
}

/* ------------------------------------------------------------ all of a tag */

#define EACH(one, wanted)                                                                          \
    for (Segment *one = segments; one; one = one->next)                                            \
        if (one->tag == (wanted))

uint64_t qv_bytes(int tag) {
    uint64_t sum = 0;
    pthread_mutex_lock(&lock);
    EACH(one, tag) sum += one->size;
    pthread_mutex_unlock(&lock);
    return sum;
}

/* Give the memory back; the addresses stay reserved. */
Result qv_drop(int tag) {
    pthread_mutex_lock(&lock);
    Result result = cuCtxSynchronize();
    EACH(one, tag) {
        if (!result && one->is_mapped) result = unmap(one);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Memory behind all of a tag's addresses, or behind none that had none. */
Result qv_map(int tag) {
    Result result = 0;
    pthread_mutex_lock(&lock);
    Segment *last = NULL;
    EACH(one, tag) {
        if (!result && !one->is_mapped && (result = map(one))) last = one;
    }
    if (result) EACH(one, tag) {
            if (one == last) break;
            if (one->is_mapped) unmap(one);
        }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Copy a tag's bytes to the host, one segment after the other. */
Result qv_save(int tag, unsigned char *host) {
    pthread_mutex_lock(&lock);
    Result result = cuCtxSynchronize(), ended;
    EACH(one, tag) {
        if (!result) result = cuMemcpyDtoHAsync_v2(host, one->at, one->size, NULL);
        host += one->size;
    }
    ended = cuCtxSynchronize();
    pthread_mutex_unlock(&lock);
    return result ? result : ended;
}

/* The bytes that were saved, in the same order; without a host's: zeros. */
Result qv_fill(int tag, const unsigned char *host) {
    Result result = 0, ended;
    pthread_mutex_lock(&lock);
    EACH(one, tag) {
        if (!result)
            result = host ? cuMemcpyHtoDAsync_v2(one->at, host, one->size, NULL)
                          : cuMemsetD32Async(one->at, 0, one->size / 4, NULL);
        if (host) host += one->size;
    }
    ended = cuCtxSynchronize();
    pthread_mutex_unlock(&lock);
    return result ? result : ended;
}

Result qv_host_alloc(void **at, size_t size) {
    return is_open ? cuMemHostAlloc(at, size, 0) : NOT_INITIALIZED;
}

Result qv_host_free(void *at) { return cuMemFreeHost(at); }
