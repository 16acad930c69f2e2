/* AdamW (arXiv 1711.05101) in one pass over fp32 streams, at the speed of memory.
 *
 * Built once per instruction set, with TK_UNIT as its name. Every operation is one that IEEE 754 rounds exactly, in the
 * order of the source, so all units, cuts and numbers of threads give the same bits. */
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define JOINED(name, unit) name##_##unit
#define NAMED(name, unit) JOINED(name, unit)
#define PUBLIC __attribute__((visibility("default")))
#define MOST_THREADS 256
#define ALIGNED 64 /* elements: two threads never write one line of the cache */

/* One update; the factors are those of a step, computed in double precision. */
typedef struct {
    int64_t count;
    float *master, *exp_avg, *exp_avg_sq;
    const float *grad;
    uint16_t *bf16; /* takes the rounded masters; NULL: nothing does */
    float grad_factor;    /* for clipping and the loss scale */
    float decay_factor;   /* 1 - lr * weight_decay */
    float new_avg;        /* 1 - beta1 */
    float old_sq, new_sq; /* beta2, 1 - beta2 */
    float step_size;      /* lr / (1 - beta1^t) */
    float root;           /* sqrt(1 - beta2^t) */
    float eps;
} adamw_update;

/* To the nearest bf16, ties to even, as torch rounds; a NaN gives torch's NaN. */
static inline uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline void update(const adamw_update *u, int64_t begin, int64_t end, int has_bf16)
{
    const float grad_factor = u->grad_factor, decay_factor = u->decay_factor, new_avg = u->new_avg;
    const float old_sq = u->old_sq, new_sq = u->new_sq, step_size = u->step_size, root = u->root, eps = u->eps;
    float *restrict master = u->master, *restrict exp_avg = u->exp_avg, *restrict exp_avg_sq = u->exp_avg_sq;
    const float *restrict grad = u->grad;
    uint16_t *restrict bf16 = u->bf16;

    for (int64_t i = begin; i < end; i++) {
        float g = grad[i] * grad_factor;
        float avg = exp_avg[i] + (g - exp_avg[i]) * new_avg;
        float sq = exp_avg_sq[i] * old_sq + new_sq * g * g;
        float value = master[i] * decay_factor - step_size * avg / (sqrtf(sq) / root + eps);
        exp_avg[i] = avg;
        exp_avg_sq[i] = sq;
        master[i] = value;
        if (has_bf16)
            bf16[i] = to_bf16(value);
    }
}

typedef struct {
    const adamw_update *update;
    int64_t begin, end;
} part;

static void *run(void *given)
{
    const part *p = given;
    if (p->update->bf16)
        update(p->update, p->begin, p->end, 1);
    else
        update(p->update, p->begin, p->end, 0);
    return NULL;
}

/* Updates all elements with up to `threads` threads; one that the system does not start does its part here. */
PUBLIC void NAMED(tk_adamw, TK_UNIT)(const adamw_update *u, int64_t threads)
{
    part parts[MOST_THREADS];
    pthread_t ids[MOST_THREADS];
    int started[MOST_THREADS];
    int64_t num_parts = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    int64_t length = (u->count / num_parts + ALIGNED) / ALIGNED * ALIGNED;

    for (int64_t i = 0; i < num_parts; i++) {
        int64_t begin = i * length < u->count ? i * length : u->count;
        int64_t end = u->count - begin < length ? u->count : begin + length;
        parts[i] = (part){u, begin, end};
        started[i] = i > 0 && begin < end && pthread_create(&ids[i], NULL, run, &parts[i]) == 0;
    }
    for (int64_t i = 0; i < num_parts; i++)
        if (!started[i])
            run(&parts[i]);
    for (int64_t i = 0; i < num_parts; i++)
        if (started[i])
            pthread_join(ids[i], NULL);
}
