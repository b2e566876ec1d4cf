// The engine's own kernels for CPUs, as Python calls them: twostroke/engine/native/library.py declares the same.
// Tensors are row-major float32 unless a kind says otherwise; a stride counts numbers from one token to the next.
#define _GNU_SOURCE  // sched_getaffinity
#include "attention.h"
#include "few.h"
#include "pool.h"
#include "rows.h"
#include "tile_attention.h"
#include "tile_integers.h"
#include "tile_linear.h"

#ifdef HAS_TILES
#define ROWS_PAY 8  // rows of a piece from which tiles are faster

// Multiply on tiles where these are faster, which is sooner for narrow weights; returns whether that was so.
static int tiled(const product *of, int64_t threads) {
    const int whole = fits_integers(of->w);
    if (!use_tiles || of->tokens < (whole ? 5 : of->w->kind == INT8 ? 8 : 12)) return 0;
    (whole ? integer_linear : tile_linear)(of, threads);
    return 1;
}
#endif

// Prepare this process; returns whether many tokens are multiplied on tiles.
int64_t twostroke_prepare(void) {
#ifdef HAS_TILES
    return use_tiles = tiles_allowed();
#else
    return 0;
#endif
}

// A product as matrix.h says, with results side by side.
void twostroke_linear(
    const matrix *w, const float *x, int64_t x_stride, float *out, int64_t tokens, int64_t add, int64_t threads) {
    const product of = {w, x, x_stride, out, w->rows, tokens, add};
#ifdef HAS_TILES
    if (tiled(&of, threads)) return;
#endif
    few_linear(&of, threads);
}

// Norms of `count` vectors, `group` of them side by side and then `x_stride` from there to the next; out has no gaps.
void twostroke_rms_norm(
    const float *x, int64_t x_stride, int64_t group, const float *weight, float epsilon, float *out, int64_t count,
    int64_t size, int64_t threads) {
    norm n = {x, x_stride, group, weight, epsilon, out, count, size, item_tokens(size)};
    parallel(norm_item, &n, item_count(count, n.each), threads);
}

void twostroke_rotate(
    float *heads, int64_t stride, int64_t tokens, int64_t count, int64_t size, const float *turns, int64_t threads) {
    rotation r = {heads, stride, tokens, count, size, turns, item_tokens(count * size)};
    parallel(rotate_item, &r, item_count(tokens, r.each), threads);
}

void twostroke_gated(const float *gate_up, float *out, int64_t tokens, int64_t size, int64_t gelu, int64_t threads) {
    gate g = {gate_up, out, tokens, size, gelu, item_tokens(size)};
    parallel(gate_item, &g, item_count(tokens, g.each), threads);
}

// Add `count` numbers to those of `into`.
void twostroke_add(float *into, const float *more, int64_t count) {
    for (int64_t i = 0; i < count; i++) into[i] += more[i];
}

// Write keys and values of `tokens` into their pages, [kv_heads, head_dim] each.
void twostroke_append(
    const attention *a, int64_t layer, const float *keys, int64_t keys_stride, const float *values, int64_t values_stride,
    int64_t tokens) {
    for (int64_t token = 0; token < tokens; token++) {
        append_row(a->kv, layer, 0, a->slot_page[token], a->slot_offset[token], keys + token * keys_stride);
        append_row(a->kv, layer, 1, a->slot_page[token], a->slot_offset[token], values + token * values_stride);
    }
}

static void attend_item(void *context, int64_t number) {
    const attention *a = context;
    const piece p = piece_of(a, number);
#ifdef HAS_TILES
    if (use_tiles && p.rows >= ROWS_PAY && p.queries > 1 && a->tiles) {
        attend_on_tiles(a, &p);
        return;
    }
#endif
    attend_by_vectors(a, &p);
}

// Attend every query of the items to its own past; then put together those that were cut.
void twostroke_attend(
    const attention *step, int64_t layer, int64_t window, const float *q, int64_t q_stride, float *out, int64_t threads) {
    attention a = *step;
    a.layer = layer, a.window = window, a.q = q, a.q_stride = q_stride, a.out = out;
    parallel(attend_item, &a, a.item_count, threads);
    for (int64_t i = 0; i < a.merge_count; i++) merge_parts(&a, a.merges + 5 * i);
}

// A call of one of the functions above, to be made again for any number of tokens.
enum { LINEAR, RMS_NORM, ROTATE, GATED, ADD, APPEND, ATTEND };
typedef struct {
    int64_t function;
    int64_t with[9];  // addresses and numbers, where tokens are counted for one token; a float is the lower half
} call;

static inline float as_float(int64_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void twostroke_play(const call *calls, int64_t count, int64_t tokens) {
    for (const call *c = calls; c < calls + count; c++) {
        const int64_t *n = c->with;
        void *const *p = (void *const *)c->with;
        switch (c->function) {
        case LINEAR: twostroke_linear(p[0], p[1], n[2], p[3], n[4] * tokens, n[5], n[6]); break;
        case RMS_NORM: twostroke_rms_norm(p[0], n[1], n[2], p[3], as_float(n[4]), p[5], n[6] * tokens, n[7], n[8]); break;
        case ROTATE: twostroke_rotate(p[0], n[1], n[2] * tokens, n[3], n[4], p[5], n[6]); break;
        case GATED: twostroke_gated(p[0], p[1], n[2] * tokens, n[3], n[4], n[5]); break;
        case ADD: twostroke_add(p[0], p[1], n[2] * tokens); break;
        case APPEND: twostroke_append(p[0], n[1], p[2], n[3], p[4], n[5], n[6] * tokens); break;
        case ATTEND: twostroke_attend(p[0], n[1], n[2], p[3], n[4], p[5], n[6]); break;
        }
    }
}
