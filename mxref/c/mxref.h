/* Microscaled formats in one header of C99: shared scales, elements, packing, random bits, transforms and dot products.
 *
 * Every bit is that of the specification of mxref; clauses are named in brackets, as in [scale.rule.floor].
 * There is no floating-point type here. Floats are given by their bits: uint32_t for float32, uint16_t for bfloat16.
 * So nothing depends on a compiler's options or on the rounding mode, and each function can be read as hardware.
 * Nothing is allocated, and nothing is kept between calls.
 *
 *     uint8_t codes[32], scale;
 *     const mxref_treatment how = {MXREF_RCEIL, 0, MXREF_RNE, 16, 0, 0};
 *     mxref_quantize(&MXREF_MXFP4, &how, x_bits, 0, MXREF_ONE, codes, &scale);
 *
 * A tile of r rows [scale.block.tile]: take mxref_amax over all of it. If it is finite (mxref_finite), mxref_scale_code and
 * mxref_code of each element follow; otherwise the scale is mxref_scale_nan, and every code is 0.
 *
 * Not here: scales chosen by error [scale.four_over_six], orders of float32 operations [scale.arithmetic], the GEMM profiles
 * exact and bounded, and FP8 with a scale of the tensor alone.
 * Arguments are trusted. A rule for the other kind of scale, a prescale under scales with a mantissa, SR without random
 * integers, and a layer of 2^24 or more are mistakes that no function reports.
 * Everything that begins with mxref__ is internal.
 */
#ifndef MXREF_H
#define MXREF_H

#include <stdint.h>

/* ---------------------------------------------------------------- formats */

enum { MXREF_NO_SPECIAL, MXREF_NAN_ONLY, MXREF_IEEE, MXREF_TWOS_COMPLEMENT };

/* [formats.element] A code is a sign bit, exponent bits, mantissa bits. In two's complement there is no sign bit apart. */
typedef struct {
    int exponent_bits, mantissa_bits, bias, special;
} mxref_element_format;

/* [formats.e8m0] without mantissa bits, else [formats.scale]. */
typedef struct {
    int exponent_bits, mantissa_bits, bias;
} mxref_scale_format;

typedef struct {
    mxref_element_format element;
    mxref_scale_format scale;
    int k;            /* elements of a block */
    int tensor_scale; /* whether a float32 scale of the tensor stands above the blocks' */
} mxref_format;

#define MXREF_E8M0 {8, 0, 127}
#define MXREF_UE4M3 {4, 3, 7}
#define MXREF_UE5M3 {5, 3, 15}

static const mxref_format MXREF_MXFP4 = {{2, 1, 1, MXREF_NO_SPECIAL}, MXREF_E8M0, 32, 0};
static const mxref_format MXREF_MXFP4_E1M2 = {{1, 2, 1, MXREF_NO_SPECIAL}, MXREF_E8M0, 32, 0};
static const mxref_format MXREF_MXFP6_E2M3 = {{2, 3, 1, MXREF_NO_SPECIAL}, MXREF_E8M0, 32, 0};
static const mxref_format MXREF_MXFP6_E3M2 = {{3, 2, 3, MXREF_NO_SPECIAL}, MXREF_E8M0, 32, 0};
static const mxref_format MXREF_MXFP8_E4M3 = {{4, 3, 7, MXREF_NAN_ONLY}, MXREF_E8M0, 32, 0};
static const mxref_format MXREF_MXFP8_E5M2 = {{5, 2, 15, MXREF_IEEE}, MXREF_E8M0, 32, 0};
static const mxref_format MXREF_MXINT8 = {{0, 7, 0, MXREF_TWOS_COMPLEMENT}, MXREF_E8M0, 32, 0};
static const mxref_format MXREF_NVFP4 = {{2, 1, 1, MXREF_NO_SPECIAL}, MXREF_UE4M3, 16, 1};

/* ---------------------------------------------------------------- treatments */

enum { MXREF_FLOOR, MXREF_CEIL, MXREF_RCEIL, MXREF_EVEN, MXREF_TURN, MXREF_NEAREST };
enum { MXREF_RNE, MXREF_RNA, MXREF_RTZ, MXREF_SR };

typedef struct {
    int rule;           /* MXREF_NEAREST for scales with a mantissa, another one for powers of two */
    int32_t turn;       /* of MXREF_TURN, a threshold [scale.rule.threshold]: the 23-bit mantissa above which one is added to
                         * the exponent. It is 0x400000 for >1.5, 0x3FFFFF for >=1.5, and -1 for >=1. */
    int rounding;
    int sr_bits;        /* R of MXREF_SR, 1 to 22 */
    int prescale;       /* [rounding.prescale] */
    int zero_scale_one; /* [scale.zero] whether a block of zeros gets the scale 1 in place of the code 0 */
} mxref_treatment;

#define MXREF_ONE 0x3F800000u /* the float32 1, the scale of a tensor that has none */
#define MXREF_NAN 0x7FC00000u

/* ---------------------------------------------------------------- numbers */

/* A magnitude (hi 2^64 + lo) 2^e. */
typedef struct {
    uint64_t hi, lo;
    int e;
} mxref__number;

static inline mxref__number mxref__make(uint64_t m, int e) {
    mxref__number n;
    n.hi = 0;
    n.lo = m;
    n.e = e;
    return n;
}

static inline int mxref__bits64(uint64_t m) {
    int n = 0;
    for (; m; m >>= 1) n++;
    return n;
}

static inline int mxref__length(mxref__number n) { return n.hi ? 64 + mxref__bits64(n.hi) : mxref__bits64(n.lo); }

static inline mxref__number mxref__left(mxref__number n, int by) {
    n.e -= by;
    if (by >= 64) {
        n.hi = n.lo;
        n.lo = 0;
        by -= 64;
    }
    if (by) {
        n.hi = n.hi << by | n.lo >> (64 - by);
        n.lo <<= by;
    }
    return n;
}

/* Shift right; the lowest bit is set if bits that were set are lost. */
static inline mxref__number mxref__right(mxref__number n, int by) {
    uint64_t lost = 0;
    n.e += by;
    for (; by >= 64 && (n.hi | n.lo); by -= 64) {
        lost |= n.lo;
        n.lo = n.hi;
        n.hi = 0;
    }
    if (by > 63) by = 63; /* of zero */
    if (by) {
        lost |= n.lo << (64 - by);
        n.lo = n.lo >> by | n.hi << (64 - by);
        n.hi >>= by;
    }
    n.lo |= lost != 0;
    return n;
}

/* n m; n has at most 96 bits, and the product at most 128. */
static inline mxref__number mxref__times(mxref__number n, uint32_t m, int e) {
    uint64_t low = (n.lo & 0xFFFFFFFFu) * m, high = (n.lo >> 32) * m + (low >> 32);
    n.hi = n.hi * m + (high >> 32);
    n.lo = high << 32 | (low & 0xFFFFFFFFu);
    n.e += e;
    return n;
}

/* -1, 0 or 1 as a is below, equal to or above b. */
static inline int mxref__compare(mxref__number a, mxref__number b) {
    int la = mxref__length(a), lb = mxref__length(b);
    if (!la || !lb) return (la > 0) - (lb > 0);
    if (la + a.e != lb + b.e) return la + a.e < lb + b.e ? -1 : 1;
    a = mxref__left(a, 128 - la);
    b = mxref__left(b, 128 - lb);
    if (a.hi != b.hi) return a.hi < b.hi ? -1 : 1;
    return (a.lo > b.lo) - (a.lo < b.lo);
}

/* RN32 [conventions.arithmetic]: the bits of the float32 nearest to (-1)^negative n. Its lowest bit may stand for more. */
static inline uint32_t mxref__round(int negative, mxref__number n) {
    uint32_t sign = negative ? 0x80000000u : 0;
    int length = mxref__length(n), top = length + n.e - 1, unit = top < -126 ? -149 : top - 23;
    uint64_t m;
    if (!length) return sign;
    if (top > 127) return sign | 0x7F800000u;
    if (unit <= n.e) {
        m = n.lo << (n.e - unit); /* exact: n has at most 24 bits */
    } else {
        int by = unit - n.e - 2; /* two bits more, of which the lower one holds all that is behind */
        n = by < 0 ? mxref__left(n, -by) : mxref__right(n, by);
        m = (n.lo >> 2) + ((n.lo & 2) && (n.lo & 5));
    }
    /* m has up to 24 bits. 2^24 and the step from subnormal to normal carry into the exponent by themselves. */
    if (top < -126) return sign | (uint32_t)m;
    m += (uint64_t)(top + 126) << 23;
    return sign | (uint32_t)(m > 0x7F800000u ? 0x7F800000u : m);
}

/* A finite float32 as a magnitude. */
static inline mxref__number mxref__of(uint32_t bits) {
    uint32_t field = bits >> 23 & 0xFF, m = bits & 0x7FFFFF;
    return field ? mxref__make(m | 0x800000, (int)field - 150) : mxref__make(m, -149);
}

/* Whether a float32 is neither NaN nor infinite. */
static inline int mxref_finite(uint32_t bits) { return (bits & 0x7F800000u) != 0x7F800000u; }
static inline int mxref__is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

/* RN32 of a finite float32 plus (-1)^negative n, where n has at most 80 bits; an exact zero is +0 unless both are -0. */
static inline uint32_t mxref__plus(uint32_t a, int negative, mxref__number n) {
    mxref__number big = mxref__of(a), small = n;
    int sign = (int)(a >> 31), other = negative, order = mxref__compare(big, small), by;
    if (order < 0) {
        big = n;
        small = mxref__of(a);
        sign = negative;
        other = (int)(a >> 31);
    }
    if (!mxref__length(small)) return mxref__length(big) || sign == other ? mxref__round(sign, big) : 0;
    if (order == 0 && sign != other) return 0;
    big = mxref__left(big, 126 - mxref__length(big)); /* bit 125 on top: a carry has room */
    small = mxref__left(small, 126 - mxref__length(small));
    by = big.e - small.e;
    small = mxref__right(small, by > 200 ? 200 : by);
    if (sign == other) {
        big.lo += small.lo;
        big.hi += small.hi + (big.lo < small.lo);
    } else {
        big.hi -= small.hi + (big.lo < small.lo);
        big.lo -= small.lo;
    }
    return mxref__round(sign, big);
}

/* fl32(a + b) */
static inline uint32_t mxref_add(uint32_t a, uint32_t b) {
    if (mxref__is_nan(a) || mxref__is_nan(b)) return MXREF_NAN;
    if (!mxref_finite(a)) return mxref_finite(b) || a == b ? a : MXREF_NAN;
    return mxref_finite(b) ? mxref__plus(a, (int)(b >> 31), mxref__of(b)) : b;
}

/* fl32(a b) */
static inline uint32_t mxref_multiply(uint32_t a, uint32_t b) {
    uint32_t sign = (a ^ b) & 0x80000000u, x = a & 0x7FFFFFFFu, y = b & 0x7FFFFFFFu;
    mxref__number n = mxref__of(b);
    if (mxref__is_nan(a) || mxref__is_nan(b)) return MXREF_NAN;
    if (!mxref_finite(a) || !mxref_finite(b)) return x && y ? sign | 0x7F800000u : MXREF_NAN;
    return mxref__round(sign != 0, mxref__times(mxref__of(a), (uint32_t)n.lo, n.e));
}

/* RNbf16 of a float32. */
static inline uint16_t mxref_bfloat16(uint32_t bits) {
    if (mxref__is_nan(bits)) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* ---------------------------------------------------------------- the numbers of a format */

/* The value of a code without sign: (m, e) is m 2^e. */
static inline mxref__number mxref__grid(int exponent_bits, int mantissa_bits, int bias, uint32_t code) {
    uint32_t field = exponent_bits ? code >> mantissa_bits : 0, m = code & ((1u << mantissa_bits) - 1);
    return field ? mxref__make(m | 1u << mantissa_bits, (int)field - bias - mantissa_bits)
                 : mxref__make(m, 1 - bias - mantissa_bits);
}

static inline mxref__number mxref__magnitude(const mxref_element_format *f, uint32_t code) {
    return mxref__grid(f->exponent_bits, f->mantissa_bits, f->bias, code);
}

static inline uint32_t mxref_sign_bit(const mxref_element_format *f) { return 1u << (f->exponent_bits + f->mantissa_bits); }

/* The code of M. */
static inline uint32_t mxref_max_code(const mxref_element_format *f) {
    uint32_t all = mxref_sign_bit(f) - 1;
    if (f->special == MXREF_IEEE) return all - (1u << f->mantissa_bits);
    return f->special == MXREF_NAN_ONLY ? all - 1 : all;
}

/* The exponent of the largest power of two on the grid, and the mantissa of M in float32. */
static inline int mxref_emax(const mxref_element_format *f) {
    mxref__number most = mxref__magnitude(f, mxref_max_code(f));
    return mxref__length(most) - 1 + most.e;
}

static inline uint32_t mxref__max_mantissa(const mxref_element_format *f) {
    mxref__number most = mxref__magnitude(f, mxref_max_code(f));
    return (uint32_t)(most.lo << (24 - mxref__length(most))) & 0x7FFFFF;
}

static inline uint32_t mxref_scale_nan(const mxref_scale_format *f) { return (1u << (f->exponent_bits + f->mantissa_bits)) - 1; }

static inline int mxref__scale_is_nan(const mxref_scale_format *f, uint8_t code) { return code >= mxref_scale_nan(f); }

/* X of a code that is not NaN. */
static inline mxref__number mxref__scale_value(const mxref_scale_format *f, uint8_t code) {
    if (!f->mantissa_bits) return mxref__make(1, (int)code - f->bias);
    return mxref__grid(f->exponent_bits, f->mantissa_bits, f->bias, code);
}

/* M S, an integer times a power of two. */
static inline mxref__number mxref__most(const mxref_format *f) {
    mxref__number s = mxref__scale_value(&f->scale, (uint8_t)(mxref_scale_nan(&f->scale) - 1));
    return mxref__times(mxref__magnitude(&f->element, mxref_max_code(&f->element)), (uint32_t)s.lo, s.e);
}

/* n / m with 39 bits or more, the lowest of which stands for the remainder; n has at most 24 bits, m at most 24. */
static inline mxref__number mxref__over(mxref__number n, mxref__number m) {
    int by = 62 - mxref__bits64(n.lo);
    uint64_t numerator = n.lo << by;
    return mxref__make(numerator / m.lo << 1 | (numerator % m.lo != 0), n.e - by - m.e - 1);
}

/* ---------------------------------------------------------------- scales */

/* [scale.amax] The largest magnitude of n elements that share a scale, as bits; NaN and Inf are above all. */
static inline uint32_t mxref_amax(const uint32_t *x, int64_t n) {
    uint32_t most = 0;
    int64_t i;
    for (i = 0; i < n; i++)
        if ((x[i] & 0x7FFFFFFFu) > most) most = x[i] & 0x7FFFFFFFu;
    return most;
}

/* [scale.tensor.amax] The largest finite magnitude of a tensor. */
static inline uint32_t mxref_finite_amax(const uint32_t *x, int64_t n) {
    uint32_t most = 0;
    int64_t i;
    for (i = 0; i < n; i++)
        if (mxref_finite(x[i]) && (x[i] & 0x7FFFFFFFu) > most) most = x[i] & 0x7FFFFFFFu;
    return most;
}

/* [scale.tensor] t of a tensor's largest finite magnitude; 1 for a format that has none. */
static inline uint32_t mxref_tensor_scale(const mxref_format *f, uint32_t amax) {
    uint32_t t;
    if (!f->tensor_scale || !amax) return MXREF_ONE;
    t = mxref__round(0, mxref__over(mxref__of(amax), mxref__most(f)));
    return t ? t : 1;
}

/* [scale.rule.floor, ceil, rceil, even, threshold] The mantissa of amax above which the exponent grows by one. */
static inline int32_t mxref_turn(const mxref_element_format *f, const mxref_treatment *how) {
    int p = mxref__length(mxref__magnitude(f, mxref_max_code(f))) - 1;
    switch (how->rule) {
    case MXREF_CEIL: return 0;
    case MXREF_RCEIL: return (int32_t)mxref__max_mantissa(f);
    case MXREF_EVEN: return (1 << 23) - (1 << (22 - p)) - 1;
    case MXREF_TURN: return how->turn;
    default: return 0x7FFFFF;
    }
}

/* The scale code of a block with this finite amax under the scale t of its tensor. [scale.clamp, scale.rule.nearest] */
static inline uint8_t mxref_scale_code(const mxref_format *f, const mxref_treatment *how, uint32_t amax, uint32_t t) {
    const mxref_scale_format *s = &f->scale;
    mxref__number a, unit, middle;
    uint32_t low = 0, high;
    if (!amax) return (uint8_t)(how->zero_scale_one ? (uint32_t)s->bias << s->mantissa_bits : 0);
    if (!s->mantissa_bits) {
        int code = (int)(amax >> 23) - 127 - mxref_emax(&f->element) + s->bias, most = (int)mxref_scale_nan(s) - 1;
        code += (int32_t)(amax & 0x7FFFFF) > mxref_turn(&f->element, how);
        return (uint8_t)(code < 0 ? 0 : code > most ? most : code);
    }
    a = mxref__of(amax);
    unit = mxref__of(t);
    middle = mxref__magnitude(&f->element, mxref_max_code(&f->element));
    unit = mxref__times(unit, (uint32_t)middle.lo, middle.e); /* M t */
    high = mxref_scale_nan(s) - 1;
    while (low < high) { /* the largest code whose lower midpoint is not above a / (M t); at a tie it must be even */
        uint32_t code = (low + high + 1) / 2;
        int order;
        middle = mxref__scale_value(s, (uint8_t)(code - 1));
        middle = mxref__times(unit, (uint32_t)(2 * middle.lo + 1), middle.e - 1);
        order = mxref__compare(a, middle);
        if (order > 0 || (order == 0 && code % 2 == 0)) low = code;
        else high = code - 1;
    }
    return (uint8_t)low;
}

/* ---------------------------------------------------------------- elements */

/* The magnitude code of n / divisor. */
static inline uint32_t mxref__round_element(
    const mxref_element_format *f, const mxref_treatment *how, mxref__number n, mxref__number divisor, uint32_t random
) {
    uint32_t low = 0, high = mxref_max_code(f);
    mxref__number at;
    int order;
    while (low < high) { /* the largest grid point that is not above */
        uint32_t code = (low + high + 1) / 2;
        at = mxref__magnitude(f, code);
        if (mxref__compare(n, mxref__times(divisor, (uint32_t)at.lo, at.e)) >= 0) low = code;
        else high = code - 1;
    }
    if (low == mxref_max_code(f) || how->rounding == MXREF_RTZ) return low; /* [rounding.saturate], [rounding.rtz] */
    at = mxref__magnitude(f, low); /* the next grid point is (m + 1) 2^e */
    if (how->rounding == MXREF_SR) {
        /* [rounding.sr] m 2^R + T is the floor of n 2^R / (divisor 2^e). */
        int by = n.e + how->sr_bits - divisor.e - at.e;
        uint64_t shifted = by >= 0 ? n.lo << by : by > -64 ? n.lo >> -by : 0;
        uint64_t t = shifted / divisor.lo - (at.lo << how->sr_bits);
        return low + (t + random >= (uint64_t)1 << how->sr_bits);
    }
    order = mxref__compare(n, mxref__times(divisor, (uint32_t)(2 * at.lo + 1), at.e - 1));
    return low + (order > 0 || (order == 0 && (how->rounding == MXREF_RNA || low % 2)));
}

/* [rounding.sign] The code of a magnitude code under a sign. */
static inline uint8_t mxref_signed_code(const mxref_element_format *f, uint32_t magnitude, int negative) {
    if (!negative) return (uint8_t)magnitude;
    return (uint8_t)(f->special == MXREF_TWOS_COMPLEMENT ? 256 - magnitude : magnitude | mxref_sign_bit(f));
}

/* The code of a finite float32 under a scale that is not NaN; `random` is r of SR. */
static inline uint8_t mxref_code(
    const mxref_format *f, const mxref_treatment *how, uint32_t x, uint8_t scale, uint32_t t, uint32_t random
) {
    mxref__number n = mxref__of(x & 0x7FFFFFFFu), divisor = mxref__scale_value(&f->scale, scale),
                  tensor = mxref__of(f->tensor_scale ? t : MXREF_ONE);
    uint32_t magnitude = 0;
    divisor = mxref__times(divisor, (uint32_t)tensor.lo, tensor.e);
    if (how->prescale && n.lo) { /* v' = fl32(M / 2^(emax+1) v); a v that float32 cannot hold has the code 0 anyway */
        mxref__number c = mxref__magnitude(&f->element, mxref_max_code(&f->element));
        n = mxref__times(n, (uint32_t)c.lo, c.e - mxref_emax(&f->element) - 1);
        n = mxref__times(mxref__of(mxref__round(0, mxref__make(n.lo, 0))), 1, n.e);
    }
    if (divisor.lo) magnitude = mxref__round_element(&f->element, how, n, divisor, random); /* [scale.underflow] */
    return mxref_signed_code(&f->element, magnitude, (int)(x >> 31));
}

/* Quantize one block of f->k float32 values: their codes, one to a byte, and the code of their scale.
 * `random` holds r of each element under SR, and may be 0 otherwise. Returns 1 if the block holds NaN or Inf, else 0:
 * it is then a NaN block, whose codes are 0 [scale.nonfinite]. */
static inline int mxref_quantize(
    const mxref_format *f, const mxref_treatment *how, const uint32_t *x, const uint32_t *random, uint32_t t,
    uint8_t *codes, uint8_t *scale
) {
    uint32_t amax = mxref_amax(x, f->k);
    int i, finite = mxref_finite(amax);
    *scale = finite ? mxref_scale_code(f, how, amax, t) : (uint8_t)mxref_scale_nan(&f->scale);
    for (i = 0; i < f->k; i++)
        codes[i] = finite ? mxref_code(f, how, x[i], *scale, t, random ? random[i] : 0) : 0;
    return !finite;
}

enum { MXREF__NUMBER, MXREF__INFINITY, MXREF__NAN };

/* What a code is; of a number also its sign and magnitude. */
static inline int mxref__decode(const mxref_element_format *f, uint8_t code, int *negative, mxref__number *value) {
    uint32_t sign = mxref_sign_bit(f), magnitude = code & (sign - 1);
    if (f->special == MXREF_TWOS_COMPLEMENT) {
        *negative = code >> 7;
        *value = mxref__make(*negative ? 256u - code : code, 1 - f->bias - f->mantissa_bits);
        return MXREF__NUMBER;
    }
    *negative = (code & sign) != 0;
    *value = mxref__magnitude(f, magnitude);
    if (magnitude <= mxref_max_code(f)) return MXREF__NUMBER;
    return f->special == MXREF_IEEE && magnitude == mxref_max_code(f) + 1 ? MXREF__INFINITY : MXREF__NAN;
}

/* [dequantize.value, dequantize.overflow, dequantize.nan] The value of an element, as float32. */
static inline uint32_t mxref_value(const mxref_format *f, uint8_t code, uint8_t scale, uint32_t t) {
    uint32_t of_tensor = f->tensor_scale ? t : MXREF_ONE;
    mxref__number n, x = mxref__scale_value(&f->scale, scale), tensor = mxref__of(of_tensor);
    int negative, kind = mxref__decode(&f->element, code, &negative, &n);
    if (mxref__scale_is_nan(&f->scale, scale) || kind == MXREF__NAN) return MXREF_NAN;
    if (kind == MXREF__INFINITY) return (negative ? 0x80000000u : 0) | 0x7F800000u;
    n = mxref__times(n, (uint32_t)x.lo, x.e);
    if (!mxref_finite(of_tensor)) return mxref_multiply(mxref__round(negative, n), of_tensor);
    return mxref__round(negative ^ (int)(of_tensor >> 31), mxref__times(n, (uint32_t)tensor.lo, tensor.e));
}

/* ---------------------------------------------------------------- packing */

/* Bits of a code: 4, 6 or 8. */
static inline int mxref_code_bits(const mxref_element_format *f) {
    return f->special == MXREF_TWOS_COMPLEMENT ? 8 : 1 + f->exponent_bits + f->mantissa_bits;
}

/* [packing.nibbles, packing.sixes, packing.bytes] Pack n codes, the first in the lowest bits; n is a multiple of 4. */
static inline void mxref_pack(const mxref_element_format *f, const uint8_t *codes, int64_t n, uint8_t *packed) {
    uint32_t word = 0;
    int held = 0, width = mxref_code_bits(f);
    int64_t i;
    for (i = 0; i < n; i++) {
        word |= (codes[i] & ((1u << width) - 1)) << held;
        for (held += width; held >= 8; held -= 8, word >>= 8) *packed++ = (uint8_t)word;
    }
}

static inline void mxref_unpack(const mxref_element_format *f, const uint8_t *packed, int64_t n, uint8_t *codes) {
    uint32_t word = 0;
    int held = 0, width = mxref_code_bits(f);
    int64_t i;
    for (i = 0; i < n; i++, held -= width, word >>= width) {
        if (held < width) {
            word |= (uint32_t)*packed++ << held;
            held += 8;
        }
        codes[i] = (uint8_t)(word & ((1u << width) - 1));
    }
}

/* ---------------------------------------------------------------- random bits */

/* [random.philox] Philox4x32-10. */
static inline void mxref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    int round;
    for (round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

/* [random.stream] A stream: seed, and step << 32 | layer << 8 | operand. */
typedef struct {
    uint64_t seed, word;
} mxref_stream;

static inline mxref_stream mxref_stream_of(uint64_t seed, uint32_t step, uint32_t layer, uint32_t operand) {
    mxref_stream s;
    s.seed = seed;
    s.word = (uint64_t)step << 32 | (uint64_t)layer << 8 | operand;
    return s;
}

/* [random.counter] The words of call g. */
static inline void mxref_words(mxref_stream s, uint64_t g, uint32_t words[4]) {
    const uint32_t counter[4] = {(uint32_t)g, (uint32_t)(g >> 32), (uint32_t)s.word, (uint32_t)(s.word >> 32)};
    const uint32_t key[2] = {(uint32_t)s.seed, (uint32_t)(s.seed >> 32)};
    mxref_philox(counter, key, words);
}

/* [random.elements] r of the element of index i = row L + column, with R bits. */
static inline uint32_t mxref_random(mxref_stream s, uint64_t i, int sr_bits) {
    uint32_t words[4], half;
    mxref_words(s, sr_bits <= 16 ? i / 8 : i / 4, words);
    if (sr_bits > 16) return words[i % 4] >> (32 - sr_bits);
    half = words[i % 8 / 2] >> (16 * (i % 2)) & 0xFFFF;
    return half >> (16 - sr_bits);
}

/* ---------------------------------------------------------------- the Hadamard transform */

/* [hadamard.signs] Whether element i of every group is negated. The operand of `s` is the sign id, 6, 7 or 8. Its step is 0
 * under the policy `fixed`, and its layer is 0 but under `per_step_layer` [hadamard.policy]. */
static inline int mxref_negated(mxref_stream s, uint32_t i) {
    uint32_t words[4];
    mxref_words(s, i / 128, words);
    return (int)(words[i / 32 % 4] >> (i % 32) & 1);
}

/* [hadamard.order, hadamard.factor] Transform a group of n float32 values in place; its signs have been applied. */
static inline void mxref_hadamard(uint32_t *z, int n) {
    int h, i, log = 0;
    for (h = 1; h < n; h *= 2, log++)
        for (i = 0; i < n; i++)
            if (!(i & h)) {
                uint32_t s = z[i], t = z[i + h];
                z[i] = mxref_add(s, t);
                z[i + h] = mxref_add(s, t ^ 0x80000000u);
            }
    /* c = RN32(2^(-log / 2)) */
    for (i = 0; i < n; i++)
        z[i] = mxref_multiply(z[i], (log % 2 ? 0x3F3504F3u : MXREF_ONE) - ((uint32_t)(log / 2) << 23));
}

/* ---------------------------------------------------------------- products */

/* One operand of a dot product: rows of codes, one to a byte, with the scale codes of their blocks. */
typedef struct {
    const mxref_format *format;
    const uint8_t *codes, *scales;
    uint32_t t;   /* the scale of its tensor, or MXREF_ONE */
    int prescale; /* whether it was quantized with the prescale */
} mxref_operand;

/* [gemm.block_dot, gemm.special] The contribution of block b: its sign and magnitude, or NaN or infinity. */
static inline int mxref__block(
    const mxref_operand *a, const mxref_operand *b, int64_t block, int *negative, mxref__number *dot
) {
    const mxref_element_format *fa = &a->format->element, *fb = &b->format->element;
    uint64_t high = 0, low = 0; /* the sum in two's complement, in units of the smallest product */
    int e = 2 - fa->bias - fa->mantissa_bits - fb->bias - fb->mantissa_bits, infinities = 0, i, k = a->format->k;
    for (i = 0; i < k; i++) {
        int na, nb, ka, kb;
        mxref__number x, y, product;
        ka = mxref__decode(fa, a->codes[block * k + i], &na, &x);
        kb = mxref__decode(fb, b->codes[block * k + i], &nb, &y);
        if (ka == MXREF__NAN || kb == MXREF__NAN) return MXREF__NAN;
        if (ka == MXREF__INFINITY || kb == MXREF__INFINITY) {
            if ((ka == MXREF__NUMBER && !x.lo) || (kb == MXREF__NUMBER && !y.lo)) return MXREF__NAN;
            infinities |= na != nb ? 2 : 1;
            continue;
        }
        product = mxref__times(x, (uint32_t)y.lo, y.e);
        product = mxref__left(product, product.lo ? product.e - e : 0);
        if (na != nb) {
            high -= product.hi + (low < product.lo);
            low -= product.lo;
        } else {
            low += product.lo;
            high += product.hi + (low < product.lo);
        }
    }
    if (infinities) {
        *negative = infinities == 2;
        return infinities == 3 ? MXREF__NAN : MXREF__INFINITY;
    }
    *negative = (int)(high >> 63);
    if (*negative) {
        low = ~low + 1;
        high = ~high + !low;
    }
    *dot = mxref__make(low, e);
    dot->hi = high;
    return MXREF__NUMBER;
}

/* [gemm.ordered, gemm.prescale, gemm.tensor_scale] One element of C in float32, of rows with `blocks` blocks. */
static inline uint32_t mxref_dot(const mxref_operand *a, const mxref_operand *b, int64_t blocks) {
    uint32_t acc = 0;
    int64_t i;
    for (i = 0; i < blocks; i++)
        if (mxref__scale_is_nan(&a->format->scale, a->scales[i]) || mxref__scale_is_nan(&b->format->scale, b->scales[i]))
            return MXREF_NAN; /* [gemm.nan] */
    for (i = 0; i < blocks; i++) {
        int negative = 0, kind;
        mxref__number dot = mxref__make(0, 0), x = mxref__scale_value(&a->format->scale, a->scales[i]),
                      y = mxref__scale_value(&b->format->scale, b->scales[i]);
        kind = mxref__block(a, b, i, &negative, &dot);
        if (kind == MXREF__NAN) return MXREF_NAN;
        if (kind == MXREF__INFINITY) {
            acc = mxref_add(acc, (negative ? 0x80000000u : 0) | 0x7F800000u);
            if (mxref__is_nan(acc)) return MXREF_NAN;
        } else if (mxref_finite(acc)) {
            dot = mxref__times(mxref__times(dot, (uint32_t)x.lo, x.e), (uint32_t)y.lo, y.e);
            acc = mxref__plus(acc, mxref__length(dot) ? negative : 0, dot);
        }
    }
    if (a->prescale || b->prescale) { /* fl32(acc RN32(1 / c)), c the product of the factors */
        mxref__number c = mxref__make(1, 0), m;
        if (a->prescale) {
            m = mxref__magnitude(&a->format->element, mxref_max_code(&a->format->element));
            c = mxref__times(c, (uint32_t)m.lo, m.e - mxref_emax(&a->format->element) - 1);
        }
        if (b->prescale) {
            m = mxref__magnitude(&b->format->element, mxref_max_code(&b->format->element));
            c = mxref__times(c, (uint32_t)m.lo, m.e - mxref_emax(&b->format->element) - 1);
        }
        acc = mxref_multiply(acc, mxref__round(0, mxref__over(mxref__make(1, 0), c)));
    }
    if (a->format->tensor_scale) acc = mxref_multiply(acc, a->t);
    if (b->format->tensor_scale) acc = mxref_multiply(acc, b->t);
    return acc;
}

#endif
