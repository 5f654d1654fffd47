// The arithmetic of block formats, written from the clauses of the specification alone: it shares no code with
// the Python package, and the tests hold it to the same golden vectors as every other backend.
// A classic script, so that the page opens from the file system, where browsers load no modules.
"use strict";

const mx = (() => {
  // ---- bits of a float32 ----

  const shared = new DataView(new ArrayBuffer(4));
  const bitsOf = (value) => (shared.setFloat32(0, value), shared.getUint32(0));
  const valueOf = (word) => (shared.setUint32(0, word), shared.getFloat32(0));
  const INFINITY_BITS = 0x7f800000;
  /** The exponent of a normal float32. */
  const exponentOf = (value) => (bitsOf(value) >>> 23) - 127;

  /** 2^n, exact: the language does not require that of its own power function. */
  function power(n) {
    let result = 1;
    for (let i = 0; i < Math.abs(n); i++) result *= n < 0 ? 0.5 : 2;
    return result;
  }
  const POWERS = Array.from({ length: 601 }, (_, i) => power(i - 300));
  const exp2 = (n) => POWERS[n + 300];

  // ---- formats ----

  /** The magnitude of a code of exponent and mantissa bits (formats.element, formats.scale). */
  function magnitudeOfBits(code, mantissaBits, bias) {
    const c = code >> mantissaBits;
    const q = code & ((1 << mantissaBits) - 1);
    return c > 0 ? (1 + q * exp2(-mantissaBits)) * exp2(c - bias) : q * exp2(-mantissaBits) * exp2(1 - bias);
  }

  /**
   * An element format by its bits (formats.element); `specials` is none, nan or ieee, and `complement` says whether
   * negatives are in two's complement (formats.int8).
   */
  function elementFormat(name, exponentBits, mantissaBits, bias, specials, complement = false) {
    const bits = 1 + exponentBits + mantissaBits;
    const sign = 1 << (bits - 1);
    const maxCode = specials === "ieee" ? (((1 << exponentBits) - 1) << mantissaBits) - 1 : sign - (specials === "nan" ? 2 : 1);
    const grid = Array.from({ length: maxCode + 1 }, (_, code) => magnitudeOfBits(code, mantissaBits, bias));
    const infinity = specials === "ieee" ? maxCode + 1 : -1;
    const upper = Array.from({ length: sign }, (_, code) =>
      code <= maxCode ? grid[code] : code === infinity ? Infinity : NaN);
    const lower = complement ? upper.map((_, i) => -(sign - i) * grid[1]) : upper.map((value) => -value);
    const M = grid[maxCode];
    const emax = exponentOf(M);
    return {
      name, exponentBits, bias, specials, complement, bits, sign, maxCode, grid, emax, M,
      p: emax - exponentOf(M - grid[maxCode - 1]),
      values: [...upper, ...lower],
      prescale: M * exp2(-(emax + 1)),
    };
  }

  /** The code of a magnitude's code with a sign (rounding.sign). */
  function signed(code, negative, element) {
    if (!negative) return code;
    return element.complement ? -code & (2 * element.sign - 1) : code | element.sign;
  }

  /** The magnitude's code of a code. */
  function magnitudeCode(code, element) {
    return element.complement && code & element.sign ? 2 * element.sign - code : code & (element.sign - 1);
  }

  /** A scale format by its bits (formats.scale); E8M0 alone has no subnormals (formats.e8m0). */
  function scaleFormat(name, exponentBits, mantissaBits, bias, subnormals = true) {
    const nan = (1 << (exponentBits + mantissaBits)) - 1;
    const grid = Array.from({ length: nan }, (_, code) =>
      subnormals ? magnitudeOfBits(code, mantissaBits, bias) : exp2(code - bias));
    return {
      name, bias, mantissaBits, nan, grid, one: bias << mantissaBits, S: grid[nan - 1],
      powers: mantissaBits === 0 && !subnormals,
      values: Array.from({ length: 256 }, (_, code) => (code < nan ? grid[code] : NaN)),
    };
  }

  const E8M0 = scaleFormat("E8M0", 8, 0, 127, false);
  const UE4M3 = scaleFormat("UE4M3", 4, 3, 7);
  const E2M1 = elementFormat("E2M1", 2, 1, 1, "none");

  /** The block formats: each with the clause that says what it is. */
  const FORMATS = {
    mxfp4: { title: "MXFP4", element: E2M1, scale: E8M0, k: 32, clause: "formats.mxfp4" },
    mxfp8_e4m3: { title: "MXFP8 E4M3", element: elementFormat("E4M3", 4, 3, 7, "nan"), scale: E8M0, k: 32, clause: "formats.mxfp8" },
    mxfp8_e5m2: { title: "MXFP8 E5M2", element: elementFormat("E5M2", 5, 2, 15, "ieee"), scale: E8M0, k: 32, clause: "formats.mxfp8" },
    mxfp6_e2m3: { title: "MXFP6 E2M3", element: elementFormat("E2M3", 2, 3, 1, "none"), scale: E8M0, k: 32, clause: "formats.mxfp6" },
    mxfp6_e3m2: { title: "MXFP6 E3M2", element: elementFormat("E3M2", 3, 2, 3, "none"), scale: E8M0, k: 32, clause: "formats.mxfp6" },
    mxint8: { title: "MXINT8", element: elementFormat("INT8", 0, 7, 0, "none", true), scale: E8M0, k: 32, clause: "formats.mxint8" },
    mxfp4_e1m2: { title: "MXFP4 E1M2", element: elementFormat("E1M2", 1, 2, 1, "none"), scale: E8M0, k: 32, clause: "formats.mxfp4_e1m2" },
    nvfp4: { title: "NVFP4", element: E2M1, scale: UE4M3, k: 16, tensorScale: true, clause: "formats.nvfp4" },
  };

  const RULES = ["floor", "ceil", "rceil", "even"];
  const ROUNDINGS = ["rne", "rna", "rtz", "sr"];
  const SIZES = [2, 4, 8, 16, 32, 64, 128, 256];
  const POLICIES = ["none", "fixed", "per_step", "per_step_layer"];
  const MAX_SR_BITS = 22;

  /** The named rules that choose the scales of a format. */
  const rulesOf = (format) => (FORMATS[format].scale.powers ? RULES : ["nearest"]);
  const blocksOf = (format) => [`1x${FORMATS[format].k}`, `${FORMATS[format].k}x${FORMATS[format].k}`];
  /** The codes that a block of zeros can have (scale.zero). */
  const zeroScalesOf = (format) => [0, FORMATS[format].scale.one];
  /** The most random bits of SR (rounding.sr). */
  const maxBitsOf = (format) => (FORMATS[format].tensorScale ? Math.min(MAX_SR_BITS, 23 - FORMATS[format].element.p) : MAX_SR_BITS);
  /** How quotients by the scales of a format are computed: real, or in an order of float32 operations (scale.arithmetic). */
  const arithmeticsOf = (format) => (FORMATS[format].scale.powers ? ["real"] : ["real", ...Object.keys(orders)]);
  /** By which error a block may choose between two scales (scale.four_over_six). */
  const choicesOf = (format) => (FORMATS[format].scale.powers ? ["off"] : ["off", "absolute", "squared", "largest"]);
  /** The rows of a treatment that share a scale. */
  const rowsOf = (treatment) => Number(treatment.block.split("x")[0]);

  /** The defaults of a treatment in a format (recipe.overlay), and the dialects as changes of those in their format. */
  const defaultsOf = (format) => ({
    format, scale_rule: rulesOf(format)[0], rounding: "rne", sr_bits: 16, block: blocksOf(format)[0], zero_scale: 0,
    prescale: false, hadamard: 0, signs: "none", sign_vector: "", arithmetic: "real", four_over_six: "off",
  });
  const DIALECTS = {
    ocp: {},
    amd: { scale_rule: "even", zero_scale: 127 },
    nvidia: { scale_rule: "rceil" },
    tseng: { rounding: "sr", prescale: true, hadamard: 64, signs: "per_step_layer" },
    te_mxfp8: { format: "mxfp8_e4m3", scale_rule: "rceil" },
    te_nvfp4: { format: "nvfp4", arithmetic: "te" },
    torchao_nvfp4: { format: "nvfp4", arithmetic: "torchao" },
    modelopt_nvfp4: { format: "nvfp4", arithmetic: "modelopt" },
    compressed_tensors_nvfp4: { format: "nvfp4", arithmetic: "compressed_tensors" },
    ggml_nvfp4: { format: "nvfp4", arithmetic: "ggml" },
  };

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

  /** What an order of float32 operations needs of a format. */
  const sizes = ({ element, scale }) => ({ M: element.M, S: scale.S, magnitudes: element.grid });

  /** The scale of a block (scale.amax and on): u is the integer maximum of the magnitudes' bits; A and t of the tensor. */
  function scaleOf(u, treatment, tensor) {
    const { element, scale } = FORMATS[treatment.format];
    if (u >= INFINITY_BITS) return { kind: "nonfinite", byte: scale.nan };
    const order = orders[treatment.arithmetic];
    if (order) return { ...orderedScale(valueOf(u), order, treatment.format, tensor), ...(u === 0 && { kind: "zero" }) };
    if (u === 0) return { kind: "zero", byte: treatment.zero_scale };
    if (!scale.powers) return nearestScale(valueOf(u), element.M * tensor.t, scale);
    const E = u >>> 23;
    const m = u & 0x7fffff;
    const bump = m >= turn(treatment.scale_rule, element) ? 1 : 0;
    const e = E - 127 - element.emax + bump;
    const clamped = Math.min(Math.max(e, -scale.bias), scale.nan - 1 - scale.bias);
    return { kind: "rule", E, m, bump, e, clamped, byte: clamped + scale.bias };
  }

  /** The scale nearest to a over a unit, which is M t (scale.rule.nearest). */
  function nearestScale(a, unit, scale) {
    const low = below(a, unit, scale.grid);
    const high = Math.min(low + 1, scale.nan - 1);
    const half = ((scale.grid[low] + scale.grid[high]) / 2) * unit;
    return { kind: "nearest", quotient: a / unit, low, high, tie: low < high && a === half, byte: nearest(a, unit, scale.grid) };
  }

  /** The scale of a block by an order of float32 operations (scale.arithmetic). */
  function orderedScale(a, order, format, tensor) {
    const { scale } = FORMATS[format];
    const quotient = order.block(a, tensor, sizes(FORMATS[format]));
    const { grid, mantissaBits } = scale;
    const byte = order.cast(quotient, { grid, mantissaBits, nearest: (q, away) => nearest(q, 1, grid, away) });
    return { ...nearestScale(quotient, 1, scale), byte };
  }

  const chooses = ({ four_over_six: by }) => by !== undefined && by !== "off";

  /**
   * The two candidates of words that share a scale (scale.four_over_six), each with its byte, the number that amax is
   * divided by, and its error, an integer of no matter which unit; and which of them is taken.
   */
  function candidates(words, u, treatment, tensor) {
    const { element, scale } = FORMATS[treatment.format];
    const both = [element.M, exp2(element.emax)].map((over) => {
      const made = nearestScale(valueOf(u), over * tensor.t, scale);
      return { ...made, over, error: errorOf(words, scale.grid[made.byte] * tensor.t, element, treatment.four_over_six) };
    });
    return { both, taken: both[1].error < both[0].error ? 1 : 0 };
  }

  /** The real error of words under a unit, X t, rounded to nearest. */
  function errorOf(words, unit, element, by) {
    let total = 0n;
    for (const word of words) {
      const m = valueOf((word & 0x7fffffff) >>> 0);
      const P = unit === 0 ? 0 : element.grid[nearest(m, unit, element.grid)];
      const difference = integerOf(m) - integerOf(P * unit); // a double holds P times a unit
      const error = difference < 0n ? -difference : difference;
      if (by === "largest") total = error > total ? error : total;
      else total += by === "squared" ? error * error : error;
    }
    return total;
  }

  /** A double >= 0 as a multiple of 2^-200, which is below every unit here. */
  function integerOf(value) {
    wide.setFloat64(0, value);
    const bits = wide.getBigUint64(0);
    const exponent = bits >> 52n;
    const mantissa = exponent ? (bits & 0xfffffffffffffn) | 0x10000000000000n : 0n;
    const shift = exponent - 1075n + 200n;
    return shift < 0n ? mantissa >> -shift : mantissa << shift;
  }
  const wide = new DataView(new ArrayBuffer(8));

  /** Replace the bytes of blocks, or of tiles, by those of their better candidates. */
  function choose(scales, amax, y, length, treatment, tensor) {
    const { k, scale } = FORMATS[treatment.format];
    const blocks = length / k;
    const height = Math.min(rowsOf(treatment), scales.length / blocks);
    for (let top = 0; top < scales.length / blocks; top += height) {
      for (let b = 0; b < blocks; b++) {
        const rows = Array.from({ length: height }, (_, i) => top + i);
        const at = rows.map((row) => row * blocks + b);
        if (scales[at[0]] === scale.nan || amax[at[0]] === 0) continue;
        const words = rows.flatMap((row) => [...y.slice(row * length + b * k, row * length + (b + 1) * k)]);
        const { both, taken } = candidates(words, amax[at[0]], treatment, tensor);
        for (const i of at) scales[i] = both[taken].byte;
      }
    }
  }

  /** The scale t of a tensor whose largest finite magnitude has the bits A; 1 where the format has none (scale.tensor). */
  function tensorScale(A, treatment) {
    const { format, arithmetic } = treatment;
    const { element, scale, tensorScale: has } = FORMATS[format];
    if (has && orders[arithmetic]) return orders[arithmetic].tensor(valueOf(A), sizes(FORMATS[format]));
    return has && A ? Math.max(Math.fround(valueOf(A) / (element.M * (chooses(treatment) ? exp2(exponentOf(scale.S)) : scale.S))), exp2(-149)) : 1;
  }

  /** The bits of the largest finite magnitude of words (scale.tensor.amax). */
  function tensorAmax(words) {
    let A = 0;
    for (const word of words) {
      const u = (word & 0x7fffffff) >>> 0;
      if (u > A && u < INFINITY_BITS) A = u;
    }
    return A;
  }

  /** The largest of `bits(y) & 0x7FFFFFFF` (scale.amax). */
  function amaxBits(words, first, count) {
    let u = 0;
    for (let i = first; i < first + count; i++) u = Math.max(u, (words[i] & 0x7fffffff) >>> 0);
    return u;
  }

  // ---- rounding ----

  /**
   * The ratio that is rounded, as a magnitude over a unit, neither of which is rounded: under scales that are powers
   * of two, v' over 1 (rounding.scaled, rounding.prescale); in an order of float32 operations, v over 1; else |y| over
   * X t (rounding.quotient), and 0 where X is 0.
   */
  function ratio(word, byte, treatment, tensor) {
    const { element, scale } = FORMATS[treatment.format];
    const magnitude = valueOf((word & 0x7fffffff) >>> 0);
    const order = orders[treatment.arithmetic];
    if (order) {
      const v = magnitude && order.element(magnitude, scale.values[byte], tensor, sizes(FORMATS[treatment.format]));
      return { m: Math.min(v, valueOf(INFINITY_BITS - 1)), unit: 1 };
    }
    if (!scale.powers) return scale.values[byte] ? { m: magnitude, unit: scale.values[byte] * tensor.t } : { m: 0, unit: 1 };
    const v = magnitude * exp2(scale.bias - byte); // exact in a double
    return { m: treatment.prescale ? Math.fround(element.prescale * v) : v, unit: 1 };
  }

  // A unit has at most 28 bits, a point of a grid or the middle of two at most 9: a double holds their product.

  /** The code of the largest point of a grid, times a unit, that is not above a magnitude. */
  function below(m, unit, grid) {
    let low = 0;
    let high = grid.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (grid[middle] * unit <= m) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The code of the nearest point of a grid, times a unit; of two equally near the even code, or the upper one. */
  function nearest(m, unit, grid, away = false) {
    const code = below(m, unit, grid);
    if (code === grid.length - 1) return code;
    const half = ((grid[code] + grid[code + 1]) / 2) * unit;
    if (m !== half) return m > half ? code + 1 : code;
    return away || code % 2 === 1 ? code + 1 : code;
  }

  /** Where a magnitude lies between a point of a grid and the next, 0 to 1. */
  const fraction = (m, unit, code, grid) => (m - grid[code] * unit) / ((grid[code + 1] - grid[code]) * unit);

  /** The magnitude code of m over a unit (rounding.rne, .rna, .rtz, .sr, .saturate); r and R are of SR. */
  function roundMagnitude(m, unit, rounding, element, r, R) {
    const { grid, maxCode } = element;
    if (m >= element.M * unit) return maxCode;
    if (rounding === "rne" || rounding === "rna") return nearest(m, unit, grid, rounding === "rna");
    const code = below(m, unit, grid);
    if (rounding === "rtz") return code;
    const T = Math.floor(fraction(m, unit, code, grid) * exp2(R));
    return T + r >= exp2(R) ? code + 1 : code;
  }

  // ---- quantization ----

  /**
   * Codes, one per byte, and scale bytes of rows of `length` elements, which are float32 words (quantize.order).
   * `negative` are the signs of the transform. `place` says where SR's integers come from: its stream, the index
   * of each row's first element (BigInt), for a tile whose other rows are elsewhere their largest magnitude, and for
   * a format with a scale of the tensor A, and t if it is known; without either the rows are the whole tensor.
   */
  function quantize(words, length, treatment, negative, place) {
    const rows = length ? words.length / length : 0;
    const { element, scale, k } = FORMATS[treatment.format];
    let y = words;
    if (treatment.hadamard) {
      const x = new Float32Array(words.buffer, words.byteOffset, words.length);
      y = new Uint32Array(hadamard(x, treatment.hadamard, negative).buffer);
    }
    const blocks = length / k;
    const others = place.others || 0;
    const amax = new Uint32Array(rows * blocks);
    for (let b = 0; b < amax.length; b++) amax[b] = Math.max(amaxBits(y, b * k, k), others);
    const tile = rowsOf(treatment);
    if (tile > 1 && rows >= tile) shareTiles(amax, rows, blocks, tile);
    const A = place.A ?? Math.max(tensorAmax(y), tensorAmax([others]));
    const t = place.t ?? tensorScale(A, treatment);
    const tensor = { A: valueOf(A), t };
    const scales = Uint8Array.from(amax, (u) => scaleOf(u, treatment, tensor).byte);
    if (chooses(treatment)) choose(scales, amax, y, length, treatment, tensor);
    const codes = new Uint8Array(words.length);
    for (let row = 0; row < rows; row++) {
      const random = treatment.rounding === "sr"
        ? integers(checkOperand(place.stream), place.starts[row], length, treatment.sr_bits) : null;
      for (let i = 0; i < length; i++) {
        const at = row * length + i;
        const byte = scales[row * blocks + Math.floor(i / k)];
        if (byte === scale.nan) continue; // scale.nonfinite: all codes are 0
        const { m, unit } = ratio(y[at], byte, treatment, tensor);
        const code = roundMagnitude(m, unit, treatment.rounding, element, random && random[i], treatment.sr_bits);
        codes[at] = signed(code, y[at] >>> 31 === 1, element);
      }
    }
    return { codes, scales, y, amax, A, t };
  }

  /** Give the rows of a tile one amax (scale.block.tile). */
  function shareTiles(amax, rows, blocks, tile) {
    for (let top = 0; top < rows; top += tile) {
      for (let b = 0; b < blocks; b++) {
        let u = 0;
        for (let row = top; row < top + tile; row++) u = Math.max(u, amax[row * blocks + b]);
        for (let row = top; row < top + tile; row++) amax[row * blocks + b] = u;
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

  /** Values P * X * t of codes, exact (dequantize.value, dequantize.nan). */
  function dequantize(codes, scales, format, t) {
    const { element, scale, k } = FORMATS[format];
    return Float64Array.from(codes, (code, i) => element.values[code] * scale.values[scales[Math.floor(i / k)]] * t);
  }

  /** The bits of bfloat16 of float32 words, to nearest, ties to even. */
  function toBfloat16(words) {
    return Uint16Array.from(words, (word) => {
      if ((word & 0x7fffffff) >>> 0 > INFINITY_BITS) return 0x7fc0;
      return (word + 0x7fff + ((word >>> 16) & 1)) / 0x10000;
    });
  }

  return {
    FORMATS, rulesOf, blocksOf, arithmeticsOf, choicesOf, candidates, zeroScalesOf, maxBitsOf, rowsOf, isThreshold, ROUNDINGS, SIZES, POLICIES, defaultsOf, DIALECTS,
    INFINITY_BITS, bitsOf, valueOf, exp2, philox, callOf, draw, integers, checkStream, checkOperand, signVector, hadamard,
    inverseHadamard, turn, scaleOf, tensorScale, tensorAmax, amaxBits, signed, magnitudeCode, ratio, below, nearest, fraction,
    roundMagnitude, quantize, pack, unpack, dequantize, toBfloat16,
  };
})();
