/* mxref.h for SystemVerilog: one block of MXFP4 under the scale rule RCEIL, by DPI-C. */
#include "mxref.h"

#ifdef __cplusplus /* verilator compiles it as C++ */
extern "C"
#endif
void mxref_mxfp4_block(const unsigned int *x, unsigned char *codes, unsigned char *scale) {
    const mxref_treatment how = {MXREF_RCEIL, 0, MXREF_RNE, 16, 0, 0};
    mxref_quantize(&MXREF_MXFP4, &how, x, 0, MXREF_ONE, codes, scale);
}
