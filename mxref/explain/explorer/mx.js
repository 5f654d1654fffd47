// The arithmetic of block formats, written from the clauses of the specification alone: it shares no code with
// the Python package, and the tests hold it to the same golden vectors as every other backend.
// A classic script, so that the page opens from the file system, where browsers load no modules.
"use strict";

const mx = (() => {
  // ---- formats ----

  const K = 32; // elements per block

  /** An element format by its bits (formats.element); `specials` is none, nan or ieee. */
  function elementFormat(name, exponentBits, p, bias, specials) {
    const bits = 1 + exponentBits + p;
    const sign = 1 << (bits - 1);
    const maxCode = specials === "ieee" ? (((1 << exponentBits) - 1) << p) - 1 : sign - (specials === "nan" ? 2 : 1);
    const magnitude = (code) => {
      const c = code >> p;
      const q = code & ((1 << p) - 1);
      return c > 0 ? (1 + q * power(-p)) * power(c - bias) : q * power(-p) * power(1 - bias);
    };
    const grid = Array.from({ length: maxCode + 1 }, (_, code) => magnitude(code));
    const infinity = specials === "ieee" ? maxCode + 1 : -1;
    const upper = Array.from({ length: sign }, (_, code) =>
      code <= maxCode ? grid[code] : code === infinity ? Infinity : NaN);
    const emax = (maxCode >> p) - bias;
    const M = grid[maxCode];
    return {
      name, exponentBits, p, bias, specials, bits, sign, maxCode, grid, emax, M,
      values: [...upper, ...upper.map((value) => -value)],
      prescale: M * power(-(emax + 1)),
    };
  }

  /** 2^n, exact: the language does not require that of its own power function. */
  function power(n) {
    let result = 1;
    for (let i = 0; i < Math.abs(n); i++) result *= n < 0 ? 0.5 : 2;
    return result;
  }
  const POWERS = Array.from({ length: 601 }, (_, i) => power(i - 300));
  const exp2 = (n) => POWERS[n + 300];

  const FORMATS = {
    mxfp4: { title: "MXFP4", element: elementFormat("E2M1", 2, 1, 1, "none") },
    mxfp8_e4m3: { title: "MXFP8 E4M3", element: elementFormat("E4M3", 4, 3, 7, "nan") },
    mxfp8_e5m2: { title: "MXFP8 E5M2", element: elementFormat("E5M2", 5, 2, 15, "ieee") },
    mxfp6_e2m3: { title: "MXFP6 E2M3", element: elementFormat("E2M3", 2, 3, 1, "none") },
    mxfp6_e3m2: { title: "MXFP6 E3M2", element: elementFormat("E3M2", 3, 2, 3, "none") },
    mxfp4_e1m2: { title: "MXFP4 E1M2", element: elementFormat("E1M2", 1, 2, 1, "none") },
  };

  const RULES = ["floor", "ceil", "rceil", "even"];
  const ROUNDINGS = ["rne", "rna", "rtz", "sr"];
  const BLOCKS = ["1x32", "32x32"];
  const SIZES = [2, 4, 8, 16, 32, 64, 128, 256];
  const POLICIES = ["none", "fixed", "per_step", "per_step_layer"];
  const MAX_SR_BITS = 22;

  /** The defaults of a treatment (recipe.overlay), and the dialects as changes of them. */
  const DEFAULTS = {
    format: "mxfp4", scale_rule: "floor", rounding: "rne", sr_bits: 16, block: "1x32", zero_scale: 0,
    prescale: false, hadamard: 0, signs: "none", sign_vector: "",
  };
  const DIALECTS = {
    ocp: {},
    amd: { scale_rule: "even", zero_scale: 127 },
    nvidia: { scale_rule: "rceil" },
    tseng: { rounding: "sr", prescale: true, hadamard: 64, signs: "per_step_layer" },
  };

  // ---- bits of a float32 ----

  const shared = new DataView(new ArrayBuffer(4));
  const bitsOf = (value) => (shared.setFloat32(0, value), shared.getUint32(0));
  const valueOf = (word) => (shared.setUint32(0, word), shared.getFloat32(0));
  const INFINITY_BITS = 0x7f800000;

  // ---- random bits ----

  /** The high and the low word of a product of two 32-bit words. */
  function product(a, b) {
    const low = (a & 0xffff) * b; // below 2^48
    const high = (a >>> 16) * b; // below 2^48
    const middle = high + Math.floor(low / 0x10000); // below 2^49
    return [Math.floor(middle / 0x10000), Math.imul(a, b) >>> 0];
  }

  /** Philox4x32-10 (random.philox): four words from a counter of four and a key of two. */
  function philox(counter, key) {
    let [c0, c1, c2, c3] = counter;
    let [k0, k1] = key;
    for (let round = 0; round < 10; round++) {
      if (round > 0) {
        k0 = (k0 + 0x9e3779b9) >>> 0;
        k1 = (k1 + 0xbb67ae85) >>> 0;
      }
      const [high0, low0] = product(0xd2511f53, c0);
      const [high1, low1] = product(0xcd9e8d57, c2);
      [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    }
    return [c0, c1, c2, c3];
  }

  function requireRange(name, value, last) {
    if (!(value >= 0 && value <= last)) throw new RangeError(`${name} = ${value} is outside 0 to ${last}`);
  }

  /** A stream {seed, step, layer, operand} (random.stream), refused outside the ranges of random.range. */
  function checkStream(stream) {
    requireRange("seed", BigInt(stream.seed), 0xffffffffffffffffn);
    requireRange("step", stream.step, 0xffffffff);
    requireRange("layer", stream.layer, 0xffffff);
    requireRange("operand", stream.operand, 8);
    return stream;
  }

  /** Refuse the streams of signs, which belong to no operand. */
  function checkOperand(stream) {
    if (checkStream(stream).operand > 5) throw new RangeError(`operand ${stream.operand} names signs, not an operand`);
    return stream;
  }

  /** Counter and key of call g of a stream (random.counter); g and the seed are BigInt. */
  function callOf(stream, g) {
    const seed = BigInt(stream.seed);
    return {
      counter: [
        Number(g & 0xffffffffn), Number(g >> 32n), ((stream.layer << 8) | stream.operand) >>> 0, stream.step >>> 0,
      ],
      key: [Number(seed & 0xffffffffn), Number(seed >> 32n)],
    };
  }

  /** Elements that a call serves (random.elements). */
  const perCall = (R) => (R <= 16 ? 8 : 4);

  /** The integer of the element at place j of a call's words (random.elements). */
  const take = (words, j, R) =>
    R <= 16 ? ((words[j >> 1] >>> (16 * (j & 1))) & 0xffff) >>> (16 - R) : words[j] >>> (32 - R);

  /** The words of call g of a stream. */
  function call(stream, g) {
    const { counter, key } = callOf(stream, g);
    return philox(counter, key);
  }

  /** Where the element of index i (BigInt) takes its integer from: the call, the place in it, its words, and r. */
  function draw(stream, i, R) {
    const per = BigInt(perCall(R));
    const [g, j] = [i / per, Number(i % per)];
    const words = call(stream, g);
    return { g, j, words, r: take(words, j, R) };
  }

  /** The integers of consecutive elements, the first of index `start` (BigInt). */
  function integers(stream, start, count, R) {
    if (!(R >= 1 && R <= MAX_SR_BITS)) throw new RangeError(`R = ${R} is outside 1 to ${MAX_SR_BITS}`);
    checkStream(stream);
    const per = perCall(R);
    const out = new Uint32Array(count);
    let g = start / BigInt(per);
    let j = Number(start % BigInt(per));
    for (let i = 0, words = call(stream, g); i < count; i++, j++) {
      if (j === per) {
        words = call(stream, ++g);
        j = 0;
      }
      out[i] = take(words, j, R);
    }
    return out;
  }

  // ---- Hadamard transform ----

  /** Whether each d_i is -1: drawn as the policy says (hadamard.signs, hadamard.policy), or as given. */
  function signVector(n, policy, stream, given = "") {
    if (policy === "none") return Array.from({ length: n }, (_, i) => given[i] === "-");
    const { seed, step, layer, operand } = checkOperand(stream);
    const drawn = {
      seed,
      step: policy === "fixed" ? 0 : step,
      layer: policy === "per_step_layer" ? layer : 0,
      operand: 6 + (operand >> 1),
    };
    const calls = Array.from({ length: Math.ceil(n / 128) }, (_, g) => call(drawn, BigInt(g)));
    return Array.from({ length: n }, (_, i) => ((calls[i >> 7][(i >> 5) & 3] >>> (i & 31)) & 1) === 1);
  }

  const FACTORS = {
    2: 0x3f3504f3, 4: 0x3f000000, 8: 0x3eb504f3, 16: 0x3e800000,
    32: 0x3e3504f3, 64: 0x3e000000, 128: 0x3db504f3, 256: 0x3d800000,
  };

  /** Signs and transform of consecutive groups of n (hadamard.order, hadamard.factor); x and y are Float32Array. */
  function hadamard(x, n, negative) {
    const c = valueOf(FACTORS[n]);
    const y = new Float32Array(x.length);
    const z = new Float32Array(n); // a store rounds to float32
    for (let group = 0; group < x.length; group += n) {
      for (let i = 0; i < n; i++) z[i] = negative[i] ? -x[group + i] : x[group + i];
      for (let h = 1; h < n; h *= 2) {
        for (let i = 0; i < n; i++) {
          if (i & h) continue;
          const s = z[i];
          const t = z[i + h];
          z[i] = Math.fround(s + t);
          z[i + h] = Math.fround(s - t);
        }
      }
      for (let i = 0; i < n; i++) y[group + i] = Math.fround(z[i] * c);
    }
    return y;
  }

  /** The inverse (hadamard.inverse), which rounds again. */
  function inverseHadamard(y, n, negative) {
    const x = hadamard(y, n, new Array(n).fill(false));
    return x.map((value, i) => (negative[i % n] ? -value : value));
  }

  // ---- shared scale ----

  /** Whether a scale rule is a number (scale.rule.threshold), and no name. */
  const isThreshold = (rule) => /^>=?(1(\.[0-9]{1,23})?|2(\.0{1,23})?)$/.test(rule);

  function thresholdTurn(rule) {
    const [whole, decimals = ""] = rule.replace(/^>=?/, "").split(".");
    const unit = 10n ** 23n; // no double holds all decimals
    const above = (BigInt(whole + decimals.padEnd(23, "0")) - unit) * 0x800000n;
    const first = above / unit + (rule.startsWith(">=") && above % unit === 0n ? 0n : 1n);
    return Math.min(Number(first), 0x800000);
  }

  /** The mantissa from which on a rule adds one to the exponent of FLOOR; 2^23 where it never does. */
  function turn(rule, element) {
    if (isThreshold(rule)) return thresholdTurn(rule);
    if (rule === "floor") return 0x800000;
    if (rule === "ceil") return 1;
    if (rule === "rceil") return (bitsOf(element.M) & 0x7fffff) + 1;
    return 0x800000 - (1 << (22 - element.p));
  }

  /** The scale of a block (scale.amax and on): u is the integer maximum of the magnitudes' bits. */
  function scaleOf(u, treatment) {
    const element = FORMATS[treatment.format].element;
    if (u >= INFINITY_BITS) return { kind: "nonfinite", byte: 255 };
    if (u === 0) return { kind: "zero", byte: treatment.zero_scale };
    const E = u >>> 23;
    const m = u & 0x7fffff;
    const bump = m >= turn(treatment.scale_rule, element) ? 1 : 0;
    const e = E - 127 - element.emax + bump;
    const clamped = Math.min(Math.max(e, -127), 127);
    return { kind: "rule", E, m, bump, e, clamped, byte: clamped + 127 };
  }

  /** The value of a scale byte (formats.e8m0). */
  const scaleValue = (byte) => (byte === 255 ? NaN : exp2(byte - 127));

  /** The largest of `bits(y) & 0x7FFFFFFF` (scale.amax). */
  function amaxBits(words, first, count) {
    let u = 0;
    for (let i = first; i < first + count; i++) u = Math.max(u, (words[i] & 0x7fffffff) >>> 0);
    return u;
  }

  // ---- rounding ----

  /** v' (rounding.scaled, rounding.prescale) of a magnitude's bits under a finite scale byte. */
  function scaled(word, byte, treatment) {
    const v = valueOf((word & 0x7fffffff) >>> 0) * exp2(127 - byte); // exact in a double
    return treatment.prescale ? Math.fround(FORMATS[treatment.format].element.prescale * v) : v;
  }

  /** The code of the largest grid point not above v'. */
  function below(v, element) {
    let low = 0;
    let high = element.maxCode;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (element.grid[middle] <= v) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The magnitude code of v' (rounding.rne, .rna, .rtz, .sr, .saturate); r and R are of SR. */
  function roundMagnitude(v, rounding, element, r, R) {
    if (v >= element.M) return element.maxCode;
    const code = below(v, element);
    const l = element.grid[code];
    const gap = element.grid[code + 1] - l;
    if (rounding === "rtz") return code;
    if (rounding === "sr") {
      const T = Math.floor(((v - l) / gap) * exp2(R));
      return T + r >= exp2(R) ? code + 1 : code;
    }
    const rest = v - l;
    if (rest !== gap / 2) return rest > gap / 2 ? code + 1 : code;
    return rounding === "rna" || code % 2 === 1 ? code + 1 : code;
  }

  // ---- quantization ----

  /**
   * Codes, one per byte, and scale bytes of rows of `length` elements, which are float32 words (quantize.order).
   * `negative` are the signs of the transform. `place` says where SR's integers come from: its stream, the index
   * of each row's first element (BigInt), and for a tile whose other rows are elsewhere their largest magnitude.
   */
  function quantize(words, length, treatment, negative, place) {
    const rows = length ? words.length / length : 0;
    const element = FORMATS[treatment.format].element;
    let y = words;
    if (treatment.hadamard) {
      const x = new Float32Array(words.buffer, words.byteOffset, words.length);
      y = new Uint32Array(hadamard(x, treatment.hadamard, negative).buffer);
    }
    const blocks = length / K;
    const amax = new Uint32Array(rows * blocks);
    for (let b = 0; b < amax.length; b++) amax[b] = Math.max(amaxBits(y, b * K, K), place.others || 0);
    if (treatment.block === "32x32" && rows >= K) shareTiles(amax, rows, blocks);
    const scales = Uint8Array.from(amax, (u) => scaleOf(u, treatment).byte);
    const codes = new Uint8Array(words.length);
    for (let row = 0; row < rows; row++) {
      const random = treatment.rounding === "sr"
        ? integers(checkOperand(place.stream), place.starts[row], length, treatment.sr_bits) : null;
      for (let i = 0; i < length; i++) {
        const at = row * length + i;
        const byte = scales[row * blocks + Math.floor(i / K)];
        if (byte === 255) continue; // scale.nonfinite: all codes are 0
        const v = scaled(y[at], byte, treatment);
        const code = roundMagnitude(v, treatment.rounding, element, random && random[i], treatment.sr_bits);
        codes[at] = y[at] >>> 31 ? code | element.sign : code; // rounding.sign
      }
    }
    return { codes, scales, y, amax };
  }

  /** Give the 32 rows of a tile one amax (scale.block.tile). */
  function shareTiles(amax, rows, blocks) {
    for (let top = 0; top < rows; top += K) {
      for (let b = 0; b < blocks; b++) {
        let u = 0;
        for (let row = top; row < top + K; row++) u = Math.max(u, amax[row * blocks + b]);
        for (let row = top; row < top + K; row++) amax[row * blocks + b] = u;
      }
    }
  }

  /** Codes as stored, the first in the lowest bits of the first byte (packing.nibbles, packing.sixes, packing.bytes). */
  function pack(codes, bits) {
    const packed = new Uint8Array((codes.length * bits) / 8);
    codes.forEach((code, i) => {
      const word = code << (i * bits) % 8;
      packed[(i * bits) >> 3] |= word;
      if (word > 255) packed[((i * bits) >> 3) + 1] |= word >> 8;
    });
    return packed;
  }

  function unpack(packed, bits) {
    return Uint8Array.from({ length: (packed.length * 8) / bits }, (_, i) => {
      const word = packed[(i * bits) >> 3] | (packed[((i * bits) >> 3) + 1] << 8);
      return (word >> (i * bits) % 8) & ((1 << bits) - 1);
    });
  }

  /** Values P * X of codes, exact (dequantize.value, dequantize.nan). */
  function dequantize(codes, scales, format) {
    const values = FORMATS[format].element.values;
    return Float64Array.from(codes, (code, i) => values[code] * scaleValue(scales[Math.floor(i / K)]));
  }

  /** The bits of bfloat16 of float32 words, to nearest, ties to even. */
  function toBfloat16(words) {
    return Uint16Array.from(words, (word) => {
      if ((word & 0x7fffffff) >>> 0 > INFINITY_BITS) return 0x7fc0;
      return (word + 0x7fff + ((word >>> 16) & 1)) / 0x10000;
    });
  }

  return {
    K, FORMATS, RULES, isThreshold, ROUNDINGS, BLOCKS, SIZES, POLICIES, MAX_SR_BITS, DEFAULTS, DIALECTS, INFINITY_BITS,
    bitsOf, valueOf, exp2, philox, callOf, draw, integers, checkStream, checkOperand, signVector, hadamard,
    inverseHadamard, turn, scaleOf, scaleValue, amaxBits, scaled, below, roundMagnitude, quantize, pack, unpack,
    dequantize, toBfloat16,
  };
})();
