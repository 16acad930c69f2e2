// Reads of memory at full speed, with which a decoding step at batch 1 is compared: it reads all weights once.
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef uint64_t vector __attribute__((vector_size(BYTES)));

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define LINES 4  // cache lines of an iteration, each with a sum of its own
#define LINE 64
#define AHEAD 4096  // bytes

// The sums of the words that were read, by lane: they keep each read from being left out.
struct sums {
    vector lanes[LINES * LINE / BYTES];
};

static inline __attribute__((always_inline)) void add_lines(struct sums *sums, const char *from) {
    for (int i = 0; i < LINES * LINE / BYTES; i++) {
        vector read;
        memcpy(&read, from + i * BYTES, BYTES);
        sums->lanes[i] += read;
    }
}

static uint64_t total(const struct sums *sums) {
    uint64_t words[sizeof *sums / sizeof(uint64_t)], sum = 0;
    memcpy(words, sums, sizeof words);
    for (int64_t i = 0; i < (int64_t)(sizeof words / sizeof *words); i++) sum += words[i];
    return sum;
}

static inline __attribute__((always_inline)) uint64_t add_up(const char *from, int64_t bytes, int64_t passes,
                                                             int prefetch) {
    struct sums sums = {0};
    for (int64_t pass = 0; pass < passes; pass++)
        for (int64_t at = 0; at + LINES * LINE <= bytes; at += LINES * LINE) {
            if (prefetch)
                for (int i = 0; i < LINES; i++) __builtin_prefetch(from + at + AHEAD + i * LINE);
            add_lines(&sums, from + at);
        }
    return total(&sums);
}

// Both return the sum of all words, so that no read is left out; `bytes` is rounded down to whole iterations.
__attribute__((visibility("default"))) uint64_t NAMED(read_plain_, TK_NAME)(const char *from, int64_t bytes,
                                                                            int64_t passes) {
    return add_up(from, bytes, passes, 0);
}

__attribute__((visibility("default"))) uint64_t NAMED(read_prefetched_, TK_NAME)(const char *from, int64_t bytes,
                                                                                 int64_t passes) {
    return add_up(from, bytes, passes, 1);
}

// Reads `count` pieces of memory, of `bytes` bytes each, a multiple of an iteration, as attention reads a cache's
// pages; with each line of one it prefetches that of the next.
__attribute__((visibility("default"))) uint64_t NAMED(read_pieces_, TK_NAME)(const char *const *pieces, int64_t count,
                                                                             int64_t bytes, int prefetch) {
    struct sums sums = {0};
    for (int64_t piece = 0; piece < count; piece++) {
        const char *from = pieces[piece], *next = pieces[piece + 1 < count ? piece + 1 : piece];
        for (int64_t at = 0; at + LINES * LINE <= bytes; at += LINES * LINE) {
            for (int i = 0; prefetch && i < LINES; i++) __builtin_prefetch(next + at + i * LINE, 0, 2);
            add_lines(&sums, from + at);
        }
    }
    return total(&sums);
}
