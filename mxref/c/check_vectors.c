/* Hold mxref.h, or what stands in its place, to the golden vectors.
 *
 *     mxref vectors c here && cd here && cc -O2 check_vectors.c -o check_vectors && ./check_vectors
 *
 * To test your own code, call it where the functions of mxref.h are called below.
 */
#include <stdio.h>
#include <string.h>

#include "mxref_vectors.h"

enum { MOST = 65536 }; /* elements of a record */

static int checked, wrong;

static void report(const char *id, int agrees) {
    checked++;
    if (!agrees) wrong++, printf("%s differs\n", id);
}

static int same(const uint32_t *a, const uint32_t *b, int count) {
    int i;
    for (i = 0; i < count; i++)
        if (a[i] != b[i] && !(mxref__is_nan(a[i]) && mxref__is_nan(b[i]))) return 0;
    return 1;
}

static int agrees_scale(const mxref_scale_vector *v) {
    int i;
    for (i = 0; i < v->count; i++)
        if (mxref_scale_code(v->format, &v->how, v->amax[i], v->t) != v->scales[i]) return 0;
    return 1;
}

static int agrees_quantize(const mxref_quantize_vector *v) {
    static uint32_t x[MOST];
    int k = v->format->k, n = v->hadamard, row, column, blocks = v->length / k;
    uint32_t t;
    for (column = 0; column < v->rows * v->length; column++) x[column] = v->x[column];
    if (n)
        for (column = 0; column < v->rows * v->length; column += n) {
            int i;
            for (i = 0; v->negates && i < n; i++)
                if (mxref_negated(v->signs, (uint32_t)i)) x[column + i] ^= 0x80000000u;
            mxref_hadamard(x + column, n);
        }
    t = mxref_tensor_scale(v->format, v->amax ? v->amax : mxref_finite_amax(x, v->rows * v->length));
    if (!v->nonfinite && t != v->t) return 0;
    for (row = 0; row < v->rows; row += v->tile)
        for (column = 0; column < blocks; column++) {
            uint32_t amax = 0;
            uint8_t scale;
            int i, r;
            for (r = row; r < row + v->tile; r++) {
                uint32_t most = mxref_amax(x + r * v->length + column * k, k);
                if (most > amax) amax = most;
            }
            if (v->nonfinite && !mxref_finite(amax)) return 1;
            if (v->nonfinite) continue;
            scale = (uint8_t)mxref_scale_nan(&v->format->scale);
            if (mxref_finite(amax)) scale = mxref_scale_code(v->format, &v->how, amax, t);
            for (r = row; r < row + v->tile; r++) {
                if (scale != v->scales[r * blocks + column]) return 0;
                for (i = r * v->length + column * k; i < r * v->length + (column + 1) * k; i++) {
                    uint64_t index = v->first[r] + (uint64_t)(i - r * v->length);
                    uint32_t random = 0;
                    uint8_t code = 0;
                    if (v->how.rounding == MXREF_SR) random = mxref_random(v->stream, index, v->how.sr_bits);
                    if (mxref_finite(amax)) code = mxref_code(v->format, &v->how, x[i], scale, t, random);
                    if (code != v->codes[i]) return 0;
                }
            }
        }
    return !v->nonfinite;
}

static int agrees_dequantize(const mxref_dequantize_vector *v) {
    int row, i;
    for (row = 0; row < v->rows; row++)
        for (i = 0; i < v->kept; i++) {
            int at = row * v->length + i;
            uint32_t y = mxref_value(v->format, v->codes[at], v->scales[at / v->format->k], v->t);
            if (v->bfloat16) y = (uint32_t)mxref_bfloat16(y) << 16;
            if (!same(&y, v->y + row * v->kept + i, 1)) return 0;
        }
    return 1;
}

static int agrees_hadamard(const mxref_hadamard_vector *v) {
    static uint32_t x[MOST];
    int i;
    for (i = 0; i < v->count; i++) {
        int at = i % v->n;
        x[i] = v->x[i] ^ (v->signs[at / 32] >> (at % 32) & 1) << 31;
    }
    for (i = 0; i < v->count; i += v->n) mxref_hadamard(x + i, v->n);
    return same(x, v->y, v->count);
}

static int agrees_gemm(const mxref_gemm_vector *v) {
    int i, j, k = v->a.format->k;
    for (i = 0; i < v->m; i++)
        for (j = 0; j < v->n; j++) {
            mxref_operand a = v->a, b = v->b;
            uint32_t c;
            a.codes += i * v->blocks * k, a.scales += i * v->blocks;
            b.codes += j * v->blocks * k, b.scales += j * v->blocks;
            c = mxref_dot(&a, &b, v->blocks);
            if (v->bfloat16) c = (uint32_t)mxref_bfloat16(c) << 16;
            if (!same(&c, v->c + i * v->n + j, 1)) return 0;
        }
    return 1;
}

static int agrees_random(const mxref_random_vector *v) {
    int i;
    for (i = 0; i < v->count; i++)
        if (mxref_random(v->stream, v->first + (uint64_t)i, v->sr_bits) != v->r[i]) return 0;
    return 1;
}

static int agrees_signs(const mxref_signs_vector *v) {
    int i;
    for (i = 0; i < v->n; i++)
        if (mxref_negated(v->stream, (uint32_t)i) != (int)(v->signs[i / 32] >> (i % 32) & 1)) return 0;
    return 1;
}

static int agrees_pack(const mxref_pack_vector *v) {
    static uint8_t packed[MOST], codes[MOST];
    size_t bytes = (size_t)(v->count * mxref_code_bits(&v->format->element) / 8);
    mxref_pack(&v->format->element, v->codes, v->count, packed);
    mxref_unpack(&v->format->element, v->packed, v->count, codes);
    return !memcmp(packed, v->packed, bytes) && !memcmp(codes, v->codes, (size_t)v->count);
}

#define CHECK(table, agrees) \
    for (i = 0; i < sizeof table / sizeof *table; i++) report(table[i].id, agrees(&table[i]))

int main(void) {
    size_t i;
    for (i = 0; i < sizeof mxref_philox_vectors / sizeof *mxref_philox_vectors; i++) {
        const mxref_philox_vector *v = &mxref_philox_vectors[i];
        uint32_t words[4];
        mxref_philox(v->counter, v->key, words);
        report(v->id, !memcmp(words, v->words, sizeof words));
    }
    CHECK(mxref_scale_vectors, agrees_scale);
    CHECK(mxref_quantize_vectors, agrees_quantize);
    CHECK(mxref_dequantize_vectors, agrees_dequantize);
    CHECK(mxref_hadamard_vectors, agrees_hadamard);
    CHECK(mxref_gemm_vectors, agrees_gemm);
    CHECK(mxref_random_vectors, agrees_random);
    CHECK(mxref_signs_vectors, agrees_signs);
    CHECK(mxref_pack_vectors, agrees_pack);
    printf("%d checked, %d differ\n", checked, wrong);
    return wrong || !checked;
}
