// Steps without the worker's Python between them: while the engine's next message says just that every sequence goes on
// with the token that it sampled, the plan advances here, and results are sent from here. Weights drive Python's code and
// data out of the caches, so a step of Python's costs half a millisecond, in which no thread reads weights.
#ifndef TK_EXCHANGE_H
#define TK_EXCHANGE_H

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "model.h"

#define MOST_BYTES 64  // of the message on which a rank goes on

// Whether the engine's next message is there already, and the one on which the rank goes on; then it is taken.
static int takes_next_step(const struct exchange *e) {
    char seen[MOST_BYTES];
    size_t bytes = (size_t)e->next_step_bytes;
    if (bytes > sizeof seen || recv(e->descriptor, seen, bytes, MSG_PEEK | MSG_DONTWAIT) != e->next_step_bytes) return 0;
    return !memcmp(seen, e->next_step, bytes) && recv(e->descriptor, seen, bytes, 0) == e->next_step_bytes;
}

// Reads so many bytes of a message that is there; returns 0 if the engine has ended.
static int reads(const struct exchange *e, void *to, size_t bytes) {
    for (size_t got = 0; got < bytes;) {
        ssize_t count = recv(e->descriptor, (char *)to + got, bytes - got, 0);
        if (!count || (count < 0 && errno != EINTR)) return 0;
        if (count > 0) got += (size_t)count;
    }
    return 1;
}

enum reply { CHOSEN, AGAIN, OTHER };

// Waits for the engine's next message and returns its kind, without taking it.
static enum reply next_reply(const struct exchange *e) {
    char seen[MOST_BYTES];
    size_t bytes = (size_t)(e->chosen_bytes > e->again_bytes ? e->chosen_bytes : e->again_bytes);
    ssize_t count = -1;
    if (bytes > sizeof seen) return OTHER;
    do count = recv(e->descriptor, seen, bytes, MSG_PEEK);
    while (count < 0 && errno == EINTR);
    if (count >= e->chosen_bytes && !memcmp(seen, e->chosen, (size_t)e->chosen_bytes)) return CHOSEN;
    return count >= e->again_bytes && !memcmp(seen, e->again, (size_t)e->again_bytes) ? AGAIN : OTHER;
}

// Takes the tokens of a step that the engine chose; returns 0 if the engine has ended.
static int takes_chosen(const struct exchange *e, struct step *s) {
    char seen[MOST_BYTES];
    return reads(e, seen, (size_t)e->chosen_bytes) && reads(e, s->token_ids, 4 * (size_t)s->tokens);
}

// Masks for some rows of a step.
struct masked {
    int32_t count, words;  // rows; words of a mask
    const uint32_t *masks; // [count][words]
    const int32_t *rows;   // [count]
};

// Takes the masks with which rows are sampled again, into memory that the caller frees. NULL: the engine has ended, or
// there is no memory; then the message is left.
static char *takes_masks(const struct exchange *e, struct masked *found) {
    char seen[MOST_BYTES + 4], *body;
    size_t head = (size_t)e->again_bytes + 4;
    uint32_t bytes;
    if (recv(e->descriptor, seen, head, MSG_PEEK | MSG_WAITALL) != (ssize_t)head) return NULL;
    memcpy(&bytes, seen + head - 4, sizeof bytes);
    if (!(body = malloc(bytes))) return NULL;
    if (!reads(e, seen, head) || !reads(e, body, bytes)) {
        free(body);
        return NULL;
    }
    memcpy(&found->count, body, 4);
    memcpy(&found->words, body + 4, 4);
    found->masks = (const uint32_t *)(body + 8);
    found->rows = (const int32_t *)(found->masks + (int64_t)found->count * found->words);
    return body;
}

// Moves a step on by a token of each sequence: each has one, whose logits are wanted.
static void advance(struct model *m, const struct exchange *e) {
    struct step *s = &m->step;
    s->begun = 0;
    for (int32_t i = 0; i < s->tokens; i++) {
        if (!e->num_candidates) s->token_ids[i] = e->sampled[i];
        s->span[i].start++;
        e->numbers[i]++;
        s->slots[i]++;
        if (++s->positions[i] % m->block_size) continue;
        int32_t block = s->tables[s->span[i].table + s->positions[i] / m->block_size];
        s->slots[i] = block * m->block_size;
        s->begun_blocks[s->begun++] = block;
    }
}

// Sends the results of a step; returns 0 if the engine has ended.
static int send_answer(const struct model *m, const struct exchange *e) {
    size_t tokens = (size_t)m->step.tokens, sent = 0, all = (size_t)e->answer_bytes;
    size_t candidates = 4 * tokens * (size_t)e->num_candidates;
    char *end = e->answer + all - candidates;
    memcpy(end - 5 * tokens, e->sampled, 4 * tokens);
    memcpy(end - tokens, e->finite, tokens);
    memcpy(end, e->candidates, candidates);
    while (e->answers && sent < all) {
        ssize_t count = send(e->descriptor, e->answer + sent, all - sent, MSG_NOSIGNAL);
        if (count < 0 && errno != EINTR) return 0;
        if (count > 0) sent += (size_t)count;
    }
    return 1;
}

#endif
