// Causal attention of training over bf16 values, forward and backward, in blocks (FlashAttention-2, arXiv 2307.08691).
//
// Scores, their softmax and every sum are fp32; weights and gradients are rounded to bf16 where they enter a product,
// as in torch's kernel. One thread computes all heads that share a key head of a sequence, in one order, so neither the
// number of threads nor other sequences change a bit. The base unit has no kernel.
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define JOINED(name, unit) name##_##unit
#define NAMED(name, unit) JOINED(name, unit)
#define PUBLIC __attribute__((visibility("default")))
#define MOST_THREADS 256

// A tensor [batch, length, heads, width] of bf16, whose rows are dense: its strides are elements.
typedef struct {
    uint16_t *at;
    int64_t of_batch, of_row, of_head;
} view;

// One call; forward reads q, k and v and writes out and lse, backward reads these and writes the gradients.
typedef struct {
    int64_t batch, length, heads, key_heads, width;
    float scale;
    view q, k, v, out, grad_out, grad_q, grad_k, grad_v;
    float *lse;      // [batch, heads, length]: the logarithm of the sum of the exponentials of a row's scores
    int64_t failed;  // becomes 1 if memory ran out
} attention_call;

#ifdef __AVX512BF16__
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define ROWS 32  // queries of a block
#define KEYS 64  // keys of a block
#define LANES 16
#define LEAST -1e30f  // of a key that a query does not see

// The memory of one thread. Lp: the length in whole blocks of keys, W: the width; "pairs" have two neighbours of the
// dimension that a product sums over side by side, as the instruction for bf16 takes them.
typedef struct {
    uint32_t *k_pairs;     // [blocks, W / 2, KEYS]: pairs along the width
    uint32_t *v_pairs;     // forward: [Lp / 2, W], pairs of keys; backward: as k_pairs
    uint32_t *k_rows;      // backward: [Lp / 2, W], pairs of keys
    float *grad_k;         // backward: [Lp, W]
    float *grad_v;         // backward: [Lp, W]
    uint32_t *q, *grad;    // [ROWS, W / 2]
    uint32_t *q_pairs;     // backward: [ROWS / 2, W], pairs of queries
    uint32_t *grad_pairs;  // backward: [ROWS / 2, W], pairs of queries
    float *sum;            // [ROWS, W]: of the output, or of the gradient of queries
    float *scores;         // [ROWS, KEYS]
    float *slopes;         // backward: [ROWS, KEYS]: the gradients of the softmax's output
    uint32_t *weights;     // [ROWS, KEYS / 2]; in backward those of scores' gradients
    uint32_t *turned;      // backward: [ROWS / 2, KEYS], pairs of queries
    uint32_t *turned_gradients;
} scratch;

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87.
INLINE __m512 exponential(__m512 x) {
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), r);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ), y, whole);
}

// ln(x) of a normal number, in double precision of the compiler's own library: once a row.
static float logarithm(float x) { return (float)__builtin_log((double)x); }

INLINE __m512i bf16_bits(__m512 values) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)); }

// c [rows, columns] = or += a b: sums of `pairs` pairs. Pair p of row i of a is at a[i * a_row + p * a_pair]; those of
// b are [pairs, b_row]. Rows are a multiple of 4, columns of 64.
INLINE void product(float *c, int64_t c_row, const uint32_t *a, int64_t a_row, int64_t a_pair, const uint32_t *b,
                    int64_t b_row, int64_t rows, int64_t columns, int64_t pairs, int add) {
    for (int64_t n = 0; n < columns; n += 4 * LANES)
        for (int64_t m = 0; m < rows; m += 4) {
            __m512 sums[4][4];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sums[i][j] = add ? _mm512_loadu_ps(c + (m + i) * c_row + n + j * LANES) : _mm512_setzero_ps();
            for (int64_t p = 0; p < pairs; p++) {
                __m512i right[4];
                for (int j = 0; j < 4; j++) right[j] = _mm512_loadu_si512(b + p * b_row + n + j * LANES);
                for (int i = 0; i < 4; i++) {
                    __m512i left = _mm512_set1_epi32((int)a[(m + i) * a_row + p * a_pair]);
                    for (int j = 0; j < 4; j++)
                        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)left, (__m512bh)right[j]);
                }
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) _mm512_storeu_ps(c + (m + i) * c_row + n + j * LANES, sums[i][j]);
        }
}

// Copies rows [first, first + count) of a head, zeros after the last of the tensor.
static void copy_rows(uint32_t *to, const attention_call *call, view from, int64_t batch, int64_t head, int64_t first,
                      int64_t count) {
    for (int64_t i = 0; i < count; i++, to += call->width / 2) {
        const uint16_t *row = from.at + batch * from.of_batch + (first + i) * from.of_row + head * from.of_head;
        if (first + i < call->length) memcpy(to, row, (size_t)call->width * 2);
        else memset(to, 0, (size_t)call->width * 2);
    }
}

// Joins neighbouring rows [count, width]: [count / 2, width], the even row in the lower halves.
static void pair_rows(uint32_t *to, const uint32_t *rows, int64_t count, int64_t width) {
    const uint16_t *from = (const uint16_t *)rows;
    for (int64_t i = 0; i < count; i += 2, from += 2 * width)
        for (int64_t j = 0; j < width; j++) *to++ = from[j] | (uint32_t)from[width + j] << 16;
}

// Turns rows [KEYS, width / 2] of pairs to [width / 2, KEYS].
static void turn_pairs(uint32_t *to, const uint32_t *rows, int64_t half) {
    for (int64_t p = 0; p < half; p++)
        for (int64_t i = 0; i < KEYS; i++) *to++ = rows[i * half + p];
}

static void write_rows(const attention_call *call, view to, int64_t batch, int64_t head, int64_t first, int64_t count,
                       const float *from, const float *factors, float factor) {
    int64_t end = first + count < call->length ? first + count : call->length;
    for (int64_t i = first; i < end; i++, from += call->width) {
        uint16_t *row = to.at + batch * to.of_batch + i * to.of_row + head * to.of_head;
        __m512 by = _mm512_set1_ps(factors ? factors[i - first] : factor);
        for (int64_t j = 0; j < call->width; j += LANES)
            _mm256_storeu_si256((__m256i *)(row + j),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(by, _mm512_loadu_ps(from + j))));
    }
}

// The scores of queries from `row` on for the keys from `key` on; those of keys after the query are LEAST.
static void make_scores(const attention_call *call, const scratch *s, int64_t row, int64_t key) {
    int64_t half = call->width / 2;
    __m512 scale = _mm512_set1_ps(call->scale);
    product(s->scores, KEYS, s->q, half, 1, s->k_pairs + key * half, KEYS, ROWS, KEYS, half, 0);
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < KEYS; j += LANES) {
            int64_t seen = row + i - (key + j) + 1;
            __mmask16 mask = (__mmask16)(seen >= LANES ? 0xffff : seen <= 0 ? 0 : (1 << seen) - 1);
            __m512 found = _mm512_mul_ps(_mm512_loadu_ps(s->scores + i * KEYS + j), scale);
            _mm512_storeu_ps(s->scores + i * KEYS + j, _mm512_mask_blend_ps(mask, _mm512_set1_ps(LEAST), found));
        }
}

static void forward_rows(const attention_call *call, const scratch *s, int64_t batch, int64_t head, int64_t row) {
    int64_t half = call->width / 2, width = call->width;
    float most[ROWS], total[ROWS];
    copy_rows(s->q, call, call->q, batch, head, row, ROWS);
    memset(s->sum, 0, (size_t)(ROWS * width) * 4);
    for (int64_t i = 0; i < ROWS; i++) most[i] = LEAST, total[i] = 0.0f;
    for (int64_t key = 0; key < row + ROWS; key += KEYS) {
        make_scores(call, s, row, key);
        for (int64_t i = 0; i < ROWS; i++) {
            const float *scores = s->scores + i * KEYS;
            __m512 top = _mm512_loadu_ps(scores), sum = _mm512_setzero_ps();
            for (int64_t j = LANES; j < KEYS; j += LANES) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j));
            float now = _mm512_reduce_max_ps(top);
            now = now > most[i] ? now : most[i];
            __m512 old = exponential(_mm512_set1_ps(most[i] - now));
            for (int64_t j = 0; j < KEYS; j += LANES) {
                __m512 p = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(now)));
                sum = _mm512_add_ps(sum, p);
                _mm256_storeu_si256((__m256i *)(s->weights + i * KEYS / 2 + j / 2), (__m256i)_mm512_cvtneps_pbh(p));
            }
            total[i] = total[i] * _mm512_cvtss_f32(old) + _mm512_reduce_add_ps(sum);
            if (now != most[i])
                for (int64_t j = 0; j < width; j += LANES) {
                    float *at = s->sum + i * width + j;
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), old));
                }
            most[i] = now;
        }
        product(s->sum, width, s->weights, KEYS / 2, 1, s->v_pairs + key * half, width, ROWS, width, KEYS / 2, 1);
    }
    for (int64_t i = 0; i < ROWS && row + i < call->length; i++) {
        call->lse[(batch * call->heads + head) * call->length + row + i] = most[i] + logarithm(total[i]);
        total[i] = 1.0f / total[i];
    }
    write_rows(call, call->out, batch, head, row, ROWS, s->sum, total, 0.0f);
}

// Of each row, the sum of the products of an output and its gradient.
static void dot_rows(const attention_call *call, const scratch *s, float *dots) {
    for (int64_t i = 0; i < ROWS; i++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t p = 0; p < call->width / 2; p += LANES) {
            __m512i a = _mm512_loadu_si512(s->q + i * call->width / 2 + p);
            __m512i b = _mm512_loadu_si512(s->grad + i * call->width / 2 + p);
            sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
        }
        dots[i] = _mm512_reduce_add_ps(sum);
    }
}

// Makes the weights of two neighbouring queries and the gradients of their scores, the latter without the scale.
INLINE void two_rows(const scratch *s, int64_t i, const float *lse, const float *dots) {
    for (int64_t j = 0; j < KEYS; j += LANES) {
        __m512i p[2], g[2];
        for (int n = 0; n < 2; n++) {
            __m512 scores = _mm512_loadu_ps(s->scores + (i + n) * KEYS + j);
            __m512 weight =
                exponential(_mm512_min_ps(_mm512_sub_ps(scores, _mm512_set1_ps(lse[i + n])), _mm512_setzero_ps()));
            __m512 slope = _mm512_sub_ps(_mm512_loadu_ps(s->slopes + (i + n) * KEYS + j), _mm512_set1_ps(dots[i + n]));
            __m512 gradient = _mm512_mul_ps(weight, slope);
            p[n] = bf16_bits(weight);
            g[n] = bf16_bits(gradient);
            _mm256_storeu_si256((__m256i *)(s->weights + (i + n) * KEYS / 2 + j / 2),
                                (__m256i)_mm512_cvtneps_pbh(gradient));
        }
        _mm512_storeu_si512(s->turned + i / 2 * KEYS + j, _mm512_or_si512(p[0], _mm512_slli_epi32(p[1], 16)));
        _mm512_storeu_si512(s->turned_gradients + i / 2 * KEYS + j, _mm512_or_si512(g[0], _mm512_slli_epi32(g[1], 16)));
    }
}

static void backward_rows(const attention_call *call, const scratch *s, int64_t batch, int64_t head, int64_t row) {
    int64_t half = call->width / 2, width = call->width;
    float dots[ROWS], lse[ROWS];
    copy_rows(s->q, call, call->out, batch, head, row, ROWS);
    copy_rows(s->grad, call, call->grad_out, batch, head, row, ROWS);
    dot_rows(call, s, dots);
    copy_rows(s->q, call, call->q, batch, head, row, ROWS);
    pair_rows(s->q_pairs, s->q, ROWS, width);
    pair_rows(s->grad_pairs, s->grad, ROWS, width);
    for (int64_t i = 0; i < ROWS; i++)  // of rows after the last one, whose gradients are zeros, any number will do
        lse[i] = row + i < call->length ? call->lse[(batch * call->heads + head) * call->length + row + i] : 0.0f;
    memset(s->sum, 0, (size_t)(ROWS * width) * 4);
    for (int64_t key = 0; key < row + ROWS; key += KEYS) {
        make_scores(call, s, row, key);
        product(s->slopes, KEYS, s->grad, half, 1, s->v_pairs + key * half, KEYS, ROWS, KEYS, half, 0);
        for (int64_t i = 0; i < ROWS; i += 2) two_rows(s, i, lse, dots);
        product(s->sum, width, s->weights, KEYS / 2, 1, s->k_rows + key * half, width, ROWS, width, KEYS / 2, 1);
        product(s->grad_v + key * width, width, s->turned, 1, KEYS, s->grad_pairs, width, KEYS, width, ROWS / 2, 1);
        product(s->grad_k + key * width, width, s->turned_gradients, 1, KEYS, s->q_pairs, width, KEYS, width, ROWS / 2,
                1);
    }
    write_rows(call, call->grad_q, batch, head, row, ROWS, s->sum, NULL, call->scale);
}

// Computes all heads that share a key head of a sequence.
static void one_key_head(const attention_call *call, const scratch *s, int64_t batch, int64_t key_head, int backward) {
    int64_t half = call->width / 2, width = call->width, group = call->heads / call->key_heads;
    int64_t padded = (call->length + KEYS - 1) / KEYS * KEYS;
    uint32_t *rows = (uint32_t *)s->grad_k;  // free until here, and as large
    for (int64_t key = 0; key < padded; key += KEYS) {
        copy_rows(rows, call, call->k, batch, key_head, key, KEYS);
        turn_pairs(s->k_pairs + key * half, rows, half);
        if (backward) pair_rows(s->k_rows + key * half, rows, KEYS, width);
        copy_rows(rows, call, call->v, batch, key_head, key, KEYS);
        if (backward) turn_pairs(s->v_pairs + key * half, rows, half);
        else pair_rows(s->v_pairs + key * half, rows, KEYS, width);
    }
    if (backward)
        memset(s->grad_k, 0, (size_t)(padded * width) * 4), memset(s->grad_v, 0, (size_t)(padded * width) * 4);
    for (int64_t head = key_head * group; head < (key_head + 1) * group; head++)
        for (int64_t row = 0; row < call->length; row += ROWS) {
            if (backward) backward_rows(call, s, batch, head, row);
            else forward_rows(call, s, batch, head, row);
        }
    if (!backward) return;
    write_rows(call, call->grad_k, batch, key_head, 0, padded, s->grad_k, NULL, call->scale);
    write_rows(call, call->grad_v, batch, key_head, 0, padded, s->grad_v, NULL, 1.0f);
}

typedef struct {
    attention_call *call;
    atomic_llong next;
    int backward;
} job;

static void *run(void *given) {
    job *j = given;
    const attention_call *call = j->call;
    int64_t width = call->width, whole = (call->length + KEYS - 1) / KEYS * KEYS * width;
    int64_t block = ROWS * width, tile = ROWS * KEYS;
    int64_t sizes[] = {whole / 2, whole / 2, whole / 2, whole, whole,    block / 2, block / 2, block / 2,
                       block / 2, block,     tile,      tile,  tile / 2, tile / 2,  tile / 2};
    int64_t total = 0, count = sizeof(sizes) / sizeof(*sizes);
    uint32_t *at[sizeof(sizes) / sizeof(*sizes)];
    for (int64_t i = 0; i < count; i++) total += sizes[i];
    uint32_t *memory = aligned_alloc(64, (size_t)total * 4);
    if (!memory) {
        __atomic_store_n(&j->call->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    for (int64_t i = 0, first = 0; i < count; first += sizes[i++]) at[i] = memory + first;
    scratch s = {at[0], at[1],          at[2],           (float *)at[3],  (float *)at[4], at[5],  at[6], at[7],
                 at[8], (float *)at[9], (float *)at[10], (float *)at[11], at[12],         at[13], at[14]};
    for (int64_t n; (n = atomic_fetch_add(&j->next, 1)) < call->batch * call->key_heads;)
        one_key_head(call, &s, n / call->key_heads, n % call->key_heads, j->backward);
    free(memory);
    return NULL;
}

// Runs forward or backward with up to `threads` threads; one that the system does not start is done without.
PUBLIC void NAMED(tk_attention, TK_UNIT)(attention_call *call, int64_t backward, int64_t threads) {
    pthread_t ids[MOST_THREADS];
    job j = {call, 0, (int)backward};
    int64_t units = call->batch * call->key_heads, started = 0;
    threads = threads < units ? threads : units;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    while (started < threads - 1 && pthread_create(&ids[started], NULL, run, &j) == 0) started++;
    run(&j);
    for (int64_t i = 0; i < started; i++) pthread_join(ids[i], NULL);
}
#else
PUBLIC void NAMED(tk_attention, TK_UNIT)(attention_call *call, int64_t backward, int64_t threads) { call->failed = 1; }
#endif
