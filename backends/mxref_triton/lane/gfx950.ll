; gfx950's conversions to elements of 6 bits, which Triton has no operation for: `lane/gfx950.py` calls these functions.
;
; One instruction divides 32 float32 values by a power of two, rounds them to nearest even, saturates, and writes six
; words. Its two sources hold the values of even and of odd index. A function returns one of the words; six calls with
; the same values become one instruction. It takes several passes, so its result must not lie over a source, which LLVM
; before pull request 188809 allows. The empty assembly reads the sources once more, so they are still held when the
; result is written.

define i32 @__mxref_e2m3(
    float %x0, float %x1, float %x2, float %x3, float %x4, float %x5, float %x6, float %x7,
    float %x8, float %x9, float %x10, float %x11, float %x12, float %x13, float %x14, float %x15,
    float %x16, float %x17, float %x18, float %x19, float %x20, float %x21, float %x22, float %x23,
    float %x24, float %x25, float %x26, float %x27, float %x28, float %x29, float %x30, float %x31,
    float %divisor, i32 %word) #0 {
  %even0 = insertelement <16 x float> poison, float %x0, i32 0
  %even1 = insertelement <16 x float> %even0, float %x2, i32 1
  %even2 = insertelement <16 x float> %even1, float %x4, i32 2
  %even3 = insertelement <16 x float> %even2, float %x6, i32 3
  %even4 = insertelement <16 x float> %even3, float %x8, i32 4
  %even5 = insertelement <16 x float> %even4, float %x10, i32 5
  %even6 = insertelement <16 x float> %even5, float %x12, i32 6
  %even7 = insertelement <16 x float> %even6, float %x14, i32 7
  %even8 = insertelement <16 x float> %even7, float %x16, i32 8
  %even9 = insertelement <16 x float> %even8, float %x18, i32 9
  %even10 = insertelement <16 x float> %even9, float %x20, i32 10
  %even11 = insertelement <16 x float> %even10, float %x22, i32 11
  %even12 = insertelement <16 x float> %even11, float %x24, i32 12
  %even13 = insertelement <16 x float> %even12, float %x26, i32 13
  %even14 = insertelement <16 x float> %even13, float %x28, i32 14
  %even15 = insertelement <16 x float> %even14, float %x30, i32 15
  %odd0 = insertelement <16 x float> poison, float %x1, i32 0
  %odd1 = insertelement <16 x float> %odd0, float %x3, i32 1
  %odd2 = insertelement <16 x float> %odd1, float %x5, i32 2
  %odd3 = insertelement <16 x float> %odd2, float %x7, i32 3
  %odd4 = insertelement <16 x float> %odd3, float %x9, i32 4
  %odd5 = insertelement <16 x float> %odd4, float %x11, i32 5
  %odd6 = insertelement <16 x float> %odd5, float %x13, i32 6
  %odd7 = insertelement <16 x float> %odd6, float %x15, i32 7
  %odd8 = insertelement <16 x float> %odd7, float %x17, i32 8
  %odd9 = insertelement <16 x float> %odd8, float %x19, i32 9
  %odd10 = insertelement <16 x float> %odd9, float %x21, i32 10
  %odd11 = insertelement <16 x float> %odd10, float %x23, i32 11
  %odd12 = insertelement <16 x float> %odd11, float %x25, i32 12
  %odd13 = insertelement <16 x float> %odd12, float %x27, i32 13
  %odd14 = insertelement <16 x float> %odd13, float %x29, i32 14
  %odd15 = insertelement <16 x float> %odd14, float %x31, i32 15
  %codes = call <6 x i32> @llvm.amdgcn.cvt.scalef32.2xpk16.fp6.f32(
      <16 x float> %even15, <16 x float> %odd15, float %divisor)
  %kept = call <6 x i32> asm "", "=v,0,v,v,v"(
      <6 x i32> %codes, <16 x float> %even15, <16 x float> %odd15, float %divisor) #1
  %out = extractelement <6 x i32> %kept, i32 %word
  ret i32 %out
}

define i32 @__mxref_e3m2(
    float %x0, float %x1, float %x2, float %x3, float %x4, float %x5, float %x6, float %x7,
    float %x8, float %x9, float %x10, float %x11, float %x12, float %x13, float %x14, float %x15,
    float %x16, float %x17, float %x18, float %x19, float %x20, float %x21, float %x22, float %x23,
    float %x24, float %x25, float %x26, float %x27, float %x28, float %x29, float %x30, float %x31,
    float %divisor, i32 %word) #0 {
  %even0 = insertelement <16 x float> poison, float %x0, i32 0
  %even1 = insertelement <16 x float> %even0, float %x2, i32 1
  %even2 = insertelement <16 x float> %even1, float %x4, i32 2
  %even3 = insertelement <16 x float> %even2, float %x6, i32 3
  %even4 = insertelement <16 x float> %even3, float %x8, i32 4
  %even5 = insertelement <16 x float> %even4, float %x10, i32 5
  %even6 = insertelement <16 x float> %even5, float %x12, i32 6
  %even7 = insertelement <16 x float> %even6, float %x14, i32 7
  %even8 = insertelement <16 x float> %even7, float %x16, i32 8
  %even9 = insertelement <16 x float> %even8, float %x18, i32 9
  %even10 = insertelement <16 x float> %even9, float %x20, i32 10
  %even11 = insertelement <16 x float> %even10, float %x22, i32 11
  %even12 = insertelement <16 x float> %even11, float %x24, i32 12
  %even13 = insertelement <16 x float> %even12, float %x26, i32 13
  %even14 = insertelement <16 x float> %even13, float %x28, i32 14
  %even15 = insertelement <16 x float> %even14, float %x30, i32 15
  %odd0 = insertelement <16 x float> poison, float %x1, i32 0
  %odd1 = insertelement <16 x float> %odd0, float %x3, i32 1
  %odd2 = insertelement <16 x float> %odd1, float %x5, i32 2
  %odd3 = insertelement <16 x float> %odd2, float %x7, i32 3
  %odd4 = insertelement <16 x float> %odd3, float %x9, i32 4
  %odd5 = insertelement <16 x float> %odd4, float %x11, i32 5
  %odd6 = insertelement <16 x float> %odd5, float %x13, i32 6
  %odd7 = insertelement <16 x float> %odd6, float %x15, i32 7
  %odd8 = insertelement <16 x float> %odd7, float %x17, i32 8
  %odd9 = insertelement <16 x float> %odd8, float %x19, i32 9
  %odd10 = insertelement <16 x float> %odd9, float %x21, i32 10
  %odd11 = insertelement <16 x float> %odd10, float %x23, i32 11
  %odd12 = insertelement <16 x float> %odd11, float %x25, i32 12
  %odd13 = insertelement <16 x float> %odd12, float %x27, i32 13
  %odd14 = insertelement <16 x float> %odd13, float %x29, i32 14
  %odd15 = insertelement <16 x float> %odd14, float %x31, i32 15
  %codes = call <6 x i32> @llvm.amdgcn.cvt.scalef32.2xpk16.bf6.f32(
      <16 x float> %even15, <16 x float> %odd15, float %divisor)
  %kept = call <6 x i32> asm "", "=v,0,v,v,v"(
      <6 x i32> %codes, <16 x float> %even15, <16 x float> %odd15, float %divisor) #1
  %out = extractelement <6 x i32> %kept, i32 %word
  ret i32 %out
}

declare <6 x i32> @llvm.amdgcn.cvt.scalef32.2xpk16.fp6.f32(<16 x float>, <16 x float>, float)
declare <6 x i32> @llvm.amdgcn.cvt.scalef32.2xpk16.bf6.f32(<16 x float>, <16 x float>, float)

attributes #0 = { alwaysinline nounwind memory(none) }
attributes #1 = { nounwind memory(none) }
