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

; The scaled matrix instruction, for operands of which one has elements of 6 bits at least: Triton has it for 4 and 8 bits.
;
; %formats is 8 times the instruction's code of A's format plus that of B's, a constant. An element format of fewer bits
; has its codes in the first words. A function returns one of the four results; see `products/sixes.py`.
define float @__mxref_multiply(
    i32 %a0, i32 %a1, i32 %a2, i32 %a3, i32 %a4, i32 %a5, i32 %a6, i32 %a7,
    i32 %b0, i32 %b1, i32 %b2, i32 %b3, i32 %b4, i32 %b5, i32 %b6, i32 %b7,
    float %c0, float %c1, float %c2, float %c3,
    i32 %scale_a, i32 %scale_b, i32 %formats, i32 %result) #2 {
  %a.0 = insertelement <8 x i32> poison, i32 %a0, i32 0
  %a.1 = insertelement <8 x i32> %a.0, i32 %a1, i32 1
  %a.2 = insertelement <8 x i32> %a.1, i32 %a2, i32 2
  %a.3 = insertelement <8 x i32> %a.2, i32 %a3, i32 3
  %a.4 = insertelement <8 x i32> %a.3, i32 %a4, i32 4
  %a.5 = insertelement <8 x i32> %a.4, i32 %a5, i32 5
  %a.6 = insertelement <8 x i32> %a.5, i32 %a6, i32 6
  %a.7 = insertelement <8 x i32> %a.6, i32 %a7, i32 7
  %b.0 = insertelement <8 x i32> poison, i32 %b0, i32 0
  %b.1 = insertelement <8 x i32> %b.0, i32 %b1, i32 1
  %b.2 = insertelement <8 x i32> %b.1, i32 %b2, i32 2
  %b.3 = insertelement <8 x i32> %b.2, i32 %b3, i32 3
  %b.4 = insertelement <8 x i32> %b.3, i32 %b4, i32 4
  %b.5 = insertelement <8 x i32> %b.4, i32 %b5, i32 5
  %b.6 = insertelement <8 x i32> %b.5, i32 %b6, i32 6
  %b.7 = insertelement <8 x i32> %b.6, i32 %b7, i32 7
  %c.0 = insertelement <4 x float> poison, float %c0, i32 0
  %c.1 = insertelement <4 x float> %c.0, float %c1, i32 1
  %c.2 = insertelement <4 x float> %c.1, float %c2, i32 2
  %c.3 = insertelement <4 x float> %c.2, float %c3, i32 3
  switch i32 %formats, label %none [
    i32 2, label %of02
    i32 3, label %of03
    i32 10, label %of12
    i32 11, label %of13
    i32 16, label %of20
    i32 17, label %of21
    i32 18, label %of22
    i32 19, label %of23
    i32 20, label %of24
    i32 24, label %of30
    i32 25, label %of31
    i32 26, label %of32
    i32 27, label %of33
    i32 28, label %of34
    i32 34, label %of42
    i32 35, label %of43
  ]
of02:
  %d02 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 0, i32 2, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of03:
  %d03 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 0, i32 3, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of12:
  %d12 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 1, i32 2, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of13:
  %d13 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 1, i32 3, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of20:
  %d20 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 2, i32 0, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of21:
  %d21 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 2, i32 1, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of22:
  %d22 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 2, i32 2, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of23:
  %d23 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 2, i32 3, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of24:
  %d24 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 2, i32 4, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of30:
  %d30 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 3, i32 0, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of31:
  %d31 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 3, i32 1, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of32:
  %d32 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 3, i32 2, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of33:
  %d33 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 3, i32 3, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of34:
  %d34 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 3, i32 4, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of42:
  %d42 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 4, i32 2, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
of43:
  %d43 = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
      <8 x i32> %a.7, <8 x i32> %b.7, <4 x float> %c.3, i32 4, i32 3, i32 0, i32 %scale_a, i32 0, i32 %scale_b)
  br label %end
none:
  unreachable
end:
  %d = phi <4 x float> [ %d02, %of02 ], [ %d03, %of03 ], [ %d12, %of12 ], [ %d13, %of13 ], [ %d20, %of20 ], [ %d21, %of21 ], [ %d22, %of22 ], [ %d23, %of23 ],
      [ %d24, %of24 ], [ %d30, %of30 ], [ %d31, %of31 ], [ %d32, %of32 ], [ %d33, %of33 ], [ %d34, %of34 ], [ %d42, %of42 ], [ %d43, %of43 ]
  %out = extractelement <4 x float> %d, i32 %result
  ret float %out
}

declare <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32(
    <8 x i32>, <8 x i32>, <4 x float>, i32 immarg, i32 immarg, i32 immarg, i32, i32 immarg, i32)

attributes #0 = { alwaysinline nounwind memory(none) }
attributes #1 = { nounwind memory(none) }
attributes #2 = { alwaysinline convergent nounwind memory(none) }
