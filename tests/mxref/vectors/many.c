/* Functions of mxref.h over many blocks at once, for a program that loads them. */
#include "mxref.h"

static const mxref_format *const FORMATS[] = {
    &MXREF_MXFP4,      &MXREF_MXFP4_E1M2, &MXREF_MXFP6_E2M3, &MXREF_MXFP6_E3M2,
    &MXREF_MXFP8_E4M3, &MXREF_MXFP8_E5M2, &MXREF_MXINT8,     &MXREF_NVFP4,
};

/* Codes are packed; `random` is the stream of all elements in order. Returns t. */
uint32_t quantize_many(
    int format, const mxref_treatment *how, const uint32_t *x, int64_t blocks, const mxref_stream *random,
    uint8_t *packed, uint8_t *scales
) {
    const mxref_format *f = FORMATS[format];
    uint32_t t = mxref_tensor_scale(f, mxref_finite_amax(x, blocks * f->k)), r[32];
    uint8_t codes[32];
    int64_t block;
    for (block = 0; block < blocks; block++) {
        int i;
        for (i = 0; how->rounding == MXREF_SR && i < f->k; i++)
            r[i] = mxref_random(*random, (uint64_t)(block * f->k + i), how->sr_bits);
        mxref_quantize(f, how, x + block * f->k, r, t, codes, scales + block);
        mxref_pack(&f->element, codes, f->k, packed + block * f->k * mxref_code_bits(&f->element) / 8);
    }
    return t;
}

void values_many(int format, const uint8_t *packed, const uint8_t *scales, uint32_t t, int64_t blocks, uint32_t *y) {
    const mxref_format *f = FORMATS[format];
    uint8_t codes[32];
    int64_t block;
    for (block = 0; block < blocks; block++) {
        int i;
        mxref_unpack(&f->element, packed + block * f->k * mxref_code_bits(&f->element) / 8, f->k, codes);
        for (i = 0; i < f->k; i++) y[block * f->k + i] = mxref_value(f, codes[i], scales[block], t);
    }
}

/* C [m, n] of codes that stand one to a byte. */
void products_many(
    int format_a, const uint8_t *a, const uint8_t *a_scales, uint32_t a_t, int a_prescale,
    int format_b, const uint8_t *b, const uint8_t *b_scales, uint32_t b_t, int b_prescale,
    int64_t m, int64_t n, int64_t blocks, uint32_t *c
) {
    int64_t i, j, length = blocks * FORMATS[format_a]->k;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            mxref_operand left, right;
            left.format = FORMATS[format_a];
            left.codes = a + i * length;
            left.scales = a_scales + i * blocks;
            left.t = a_t;
            left.prescale = a_prescale;
            right.format = FORMATS[format_b];
            right.codes = b + j * length;
            right.scales = b_scales + j * blocks;
            right.t = b_t;
            right.prescale = b_prescale;
            c[i * n + j] = mxref_dot(&left, &right, blocks);
        }
}

void hadamard_many(uint32_t *z, int n, int64_t groups) {
    int64_t i;
    for (i = 0; i < groups; i++) mxref_hadamard(z + i * n, n);
}
