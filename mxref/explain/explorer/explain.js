// One block, step by step, as data: what the drawings and sentences of the page show.
"use strict";

const explain = (() => {
  /**
   * Explain the block of a state under a treatment; codes and scale are those of mx.quantize. The state counts blocks
   * of A: another format shows the block of its own that holds the first of their numbers.
   */
  function block(state, treatment) {
    const format = mx.FORMATS[treatment.format];
    const { element, k } = format;
    const start = state.block * mx.FORMATS[state.a.format].k;
    const unit = Math.max(k, treatment.hadamard);
    const words = new Uint32Array(Math.ceil(Math.max(state.words.length, start + 1) / unit) * unit);
    words.set(state.words);
    const n = treatment.hadamard;
    const negative = n ? mx.signVector(n, treatment.signs, state.stream, treatment.sign_vector) : [];
    const others = mx.rowsOf(treatment) > 1 ? state.others : 0;
    const made = mx.quantize(words, words.length, treatment, negative, {
      stream: state.stream, starts: [state.at], others, A: state.amax,
    });
    const index = Math.floor(start / k);
    const first = index * k;
    const u = made.amax[index];
    const byte = made.scales[index];
    const tensor = { A: mx.valueOf(made.A), t: made.t };
    const found = mx.scaleOf(u, treatment, tensor);
    const chosen = treatment.four_over_six !== "off" && found.kind === "nearest"
      ? mx.candidates(made.y.slice(first, first + k), u, treatment, tensor) : null;
    const scale = {
      ...found, ...(chosen && { ...chosen.both[chosen.taken], chosen }), u, amax: mx.valueOf(u), X: format.scale.values[byte],
      ...tensor, given: state.amax !== null, isNaN: byte === format.scale.nan,
    };
    const own = mx.amaxBits(made.y, first, k);
    scale.at = own === u ? Array.from(made.y.slice(first, first + k), (w) => (w & 0x7fffffff) >>> 0).indexOf(u) : -1;
    const elements = Array.from({ length: k }, (_, i) => {
      const at = first + i;
      const given = {
        position: i, padded: at >= state.words.length, xBits: words[at], x: mx.valueOf(words[at]),
        negative: n ? negative[at % n] : false, yBits: made.y[at], y: mx.valueOf(made.y[at]), code: made.codes[at],
        magnitude: mx.magnitudeCode(made.codes[at], element),
      };
      return { ...given, ...rounded(given, scale, treatment, state, BigInt(at)) };
    });
    const codes = made.codes.slice(first, first + k);
    return {
      treatment, format, element, k, first, n, negative, scale, elements, codes,
      packed: mx.pack(codes, element.bits),
      bitsPerElement: element.bits + 8 / k,
      ...quality(elements, scale),
    };
  }

  /** How one element was rounded. */
  function rounded(given, scale, treatment, state, at) {
    if (scale.isNaN) return { kind: "nan", v: NaN, P: NaN, value: NaN, error: NaN };
    const { element } = mx.FORMATS[treatment.format];
    const P = element.values[given.code];
    const value = P * scale.X * scale.t / (treatment.prescale ? element.prescale : 1);
    const error = Math.abs(value - given.y);
    const { m, unit } = mx.ratio(given.yBits, scale.byte, treatment, scale);
    if (scale.X === 0 && given.y !== 0 && m === 0) return { kind: "down", v: NaN, fraction: null, P, value, error };
    const v = m / unit;
    const low = mx.below(m, unit, element.grid);
    const lower = element.grid[low];
    const upper = element.grid[Math.min(low + 1, element.maxCode)];
    const fraction = upper > lower ? mx.fraction(m, unit, low, element.grid) : null;
    const out = {
      v, low, lower, upper, fraction, P, value, error,
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
  function quality(elements, scale) {
    if (scale.isNaN) return { snr: null, mse: null, worst: null };
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
