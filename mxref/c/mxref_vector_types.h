/* What the table of golden vectors holds: a struct for each operation. `mxref vectors c` writes the table.
 *
 * Arrays have the block axis last, with padding, row after row. Codes stand one to a byte.
 */
#ifndef MXREF_VECTOR_TYPES_H
#define MXREF_VECTOR_TYPES_H

#include "mxref.h"

typedef struct {
    const char *id;
    const mxref_format *format;
    mxref_treatment how;
    uint32_t t; /* the scale of the tensor */
    int count;
    const uint32_t *amax;
    const uint8_t *scales;
} mxref_scale_vector;

typedef struct {
    const char *id;
    const mxref_format *format;
    mxref_treatment how;
    uint32_t amax;       /* the largest finite magnitude of the tensor; 0 if it is that of x after the transform */
    int nonfinite;       /* whether x holds NaN or Inf that the caller refuses: there is no result */
    int rows, length;    /* of elements */
    int tile;            /* rows that share a scale */
    int hadamard;        /* n, or 0 */
    int negates;         /* whether elements of a group are negated before the transform, by the stream `signs` */
    mxref_stream signs, stream;
    const uint64_t *first; /* for each row, the index of its first element in the random stream */
    const uint32_t *x;
    uint32_t t;
    const uint8_t *scales, *codes;
} mxref_quantize_vector;

typedef struct {
    const char *id;
    const mxref_format *format;
    int bfloat16; /* whether the type of y is bfloat16; its words are float32 in any case */
    uint32_t t;
    int rows, length; /* of elements */
    int kept;         /* elements of a row in y, which has no padding */
    const uint8_t *scales, *codes;
    const uint32_t *y;
} mxref_dequantize_vector;

typedef struct {
    const char *id;
    int n, count;
    const uint32_t *signs; /* bit i % 32 of word i / 32: element i of a group is negated */
    const uint32_t *x, *y;
} mxref_hadamard_vector;

/* C = A B^T in the profile `ordered`. */
typedef struct {
    const char *id;
    int bfloat16;
    int m, n, blocks; /* blocks of a row */
    mxref_operand a, b;
    const uint32_t *c;
} mxref_gemm_vector;

typedef struct {
    const char *id;
    uint32_t counter[4], key[2], words[4];
} mxref_philox_vector;

typedef struct {
    const char *id;
    mxref_stream stream;
    int sr_bits, count;
    uint64_t first;
    const uint32_t *r;
} mxref_random_vector;

typedef struct {
    const char *id;
    mxref_stream stream;
    int n;
    const uint32_t *signs;
} mxref_signs_vector;

typedef struct {
    const char *id;
    const mxref_format *format;
    int count;
    const uint8_t *codes, *packed;
} mxref_pack_vector;

#endif
