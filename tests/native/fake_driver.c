/* The calls of a GPU driver that `vault.c` makes, played with memory of the host: what is mapped can
   be read, what is not faults, and there is only so much. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long long u64;
size_t fake_limit = (size_t)-1, fake_used;
enum { GRAIN = 65536 };

int cuGetErrorString(int result, const char **text) {
    *text = result == 2 ? "out of memory" : "invalid argument";
    return 0;
}
int cuMemGetAllocationGranularity(size_t *grain, const void *wanted, int which) {
    (void)wanted, (void)which;
    *grain = GRAIN;
    return 0;
}
int cuMemAddressReserve(u64 *at, size_t size, size_t align, u64 hint, u64 flags) {
    (void)align, (void)hint, (void)flags;
    void *made = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *at = (u64)(uintptr_t)made;
    return made == MAP_FAILED;
}
int cuMemAddressFree(u64 at, size_t size) { return munmap((void *)(uintptr_t)at, size) != 0; }
int cuMemCreate(u64 *handle, size_t size, const void *wanted, u64 flags) {
    (void)wanted, (void)flags;
    if (size % GRAIN) return 1;
    if (fake_used + size > fake_limit) return 2;
    int file = memfd_create("fake", 0);
    if (file < 0 || ftruncate(file, (off_t)size)) return 1;
    fake_used += size;
    *handle = (u64)file;
    return 0;
}
int cuMemRelease(u64 handle) {
    struct stat found;
    if (fstat((int)handle, &found)) return 1;
    fake_used -= (size_t)found.st_size;
    return close((int)handle) != 0;
}
int cuMemMap(u64 at, size_t size, size_t offset, u64 handle, u64 flags) {
    (void)flags;
    void *where = (void *)(uintptr_t)at;
    int how = MAP_SHARED | MAP_FIXED;
    return mmap(where, size, PROT_NONE, how, (int)handle, (off_t)offset) != where;
}
int cuMemUnmap(u64 at, size_t size) {
    void *where = (void *)(uintptr_t)at;
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap(where, size, PROT_NONE, how, -1, 0) != where;
}
int cuMemSetAccess(u64 at, size_t size, const void *access, size_t count) {
    const int *words = access; /* kind of place, which, flags */
    if (count != 1 || words[0] != 1 || words[2] != 3) return 1;
    return mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE) != 0;
}
int cuCtxSynchronize(void) { return 0; }
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t size, void *stream) {
    (void)stream;
    memcpy(to, (void *)(uintptr_t)from, size);
    return 0;
}
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t size, void *stream) {
    (void)stream;
    memcpy((void *)(uintptr_t)to, from, size);
    return 0;
}
int cuMemsetD32Async(u64 at, unsigned value, size_t count, void *stream) {
    (void)stream;
    for (size_t i = 0; i < count; i++) ((unsigned *)(uintptr_t)at)[i] = value;
    return 0;
}
int cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    (void)flags;
    return (*at = malloc(size)) == NULL;
}
int cuMemFreeHost(void *at) {
    free(at);
    return 0;
}
