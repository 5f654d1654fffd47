// One block, step by step, as data: what the drawings and sentences of the page show.
"use strict";

const explain = (() => {
  /** Explain the block of a state under a treatment; codes and scale are those of mx.quantize. */
  function block(state, treatment) {
    const format = mx.FORMATS[treatment.format];
    const element = format.element;
    const unit = Math.max(mx.K, treatment.hadamard);
    const length = Math.max(Math.ceil(state.words.length / unit), 1) * unit;
    const needed = Math.max(length, (state.block + 1) * mx.K);
    const words = new Uint32Array(Math.ceil(needed / unit) * unit);
    words.set(state.words);
    const n = treatment.hadamard;
    const negative = n ? mx.signVector(n, treatment.signs, state.stream, treatment.sign_vector) : [];
    const others = treatment.block === "32x32" ? state.others : 0;
    const made = mx.quantize(words, words.length, treatment, negative, {
      stream: state.stream, starts: [state.at], others,
    });
    const first = state.block * mx.K;
    const u = made.amax[state.block];
    const scale = { ...mx.scaleOf(u, treatment), u, amax: mx.valueOf(u), X: mx.scaleValue(made.scales[state.block]) };
    const own = mx.amaxBits(made.y, first, mx.K);
    scale.at = own === u ? Array.from(made.y.slice(first, first + mx.K), (w) => (w & 0x7fffffff) >>> 0).indexOf(u) : -1;
    const elements = Array.from({ length: mx.K }, (_, i) => {
      const at = first + i;
      const given = {
        position: i, padded: at >= state.words.length, xBits: words[at], x: mx.valueOf(words[at]),
        negative: n ? negative[at % n] : false, yBits: made.y[at], y: mx.valueOf(made.y[at]), code: made.codes[at],
      };
      return { ...given, ...rounded(given, scale, treatment, state, BigInt(at)) };
    });
    const codes = made.codes.slice(first, first + mx.K);
    return {
      treatment, format, element, n, negative, scale, elements, codes,
      packed: mx.pack(codes, element.bits),
      bitsPerElement: element.bits + 8 / mx.K,
      ...quality(elements, scale.byte),
    };
  }

  /** How one element was rounded. */
  function rounded(given, scale, treatment, state, at) {
    if (scale.byte === 255) return { kind: "nan", v: NaN, P: NaN, value: NaN, error: NaN };
    const element = mx.FORMATS[treatment.format].element;
    const v = mx.scaled(given.yBits, scale.byte, treatment);
    const low = mx.below(v, element);
    const lower = element.grid[low];
    const upper = element.grid[Math.min(low + 1, element.maxCode)];
    const fraction = upper > lower ? (v - lower) / (upper - lower) : null;
    const P = element.values[given.code];
    const value = P * scale.X / (treatment.prescale ? element.prescale : 1);
    const out = {
      v, low, lower, upper, fraction, P, value, error: Math.abs(value - given.y),
      kind: kindOf(given, v, lower, fraction, Math.abs(P), treatment.rounding, element),
    };
    if (treatment.rounding === "sr") {
      out.draw = mx.draw(state.stream, state.at + at, treatment.sr_bits);
      if (fraction !== null) out.T = Math.floor(fraction * mx.exp2(treatment.sr_bits));
    }
    return out;
  }

  function kindOf(given, v, lower, fraction, magnitude, rounding, element) {
    if (v === lower && (v !== 0 || given.y === 0)) return "exact";
    if (v > element.M) return "saturated";
    if (fraction === 0.5 && (rounding === "rne" || rounding === "rna")) return "tie";
    return magnitude > lower ? "up" : "down";
  }

  /** Signal to noise in dB, mean squared and largest error of the block; null where a NaN or zeros leave them open. */
  function quality(elements, byte) {
    if (byte === 255) return { snr: null, mse: null, worst: null };
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const signal = sum(elements.map((e) => e.y * e.y));
    const noise = sum(elements.map((e) => e.error * e.error));
    return {
      snr: signal === 0 ? null : noise === 0 ? Infinity : 10 * Math.log10(signal / noise),
      mse: noise / elements.length,
      worst: Math.max(...elements.map((e) => e.error)),
    };
  }

  /** Which stored bytes of two blocks differ: the scale, and each byte of the codes; null for another format. */
  function differences(a, b) {
    if (!b || a.treatment.format !== b.treatment.format) return null;
    return {
      scale: a.scale.byte !== b.scale.byte,
      bytes: Array.from(a.packed, (byte, i) => byte !== b.packed[i]),
      codes: Array.from(a.codes, (code, i) => code !== b.codes[i]),
    };
  }

  return { block, differences };
})();
