// The bytes that a kernel wrote: read from text or .npy files, and held against those of a treatment.
"use strict";

const kernel = (() => {
  const LIMIT = 1 << 20; // numbers of an array, which take about a second

  class KernelError extends Error {}

  function fail(message) {
    throw new KernelError(message);
  }

  /** The bytes of pasted text: hexadecimal as 7e or 0x7e or 7e1200, or decimal from -128 to 255. */
  function parseBytes(text, notation) {
    const cleaned = text.replace(/\b(tensor|array|np|numpy|torch|dtype)\b[.=(]*|\bu?int8\b/g, " ");
    const tokens = cleaned.split(/[\s,;()[\]{}|]+/).filter(Boolean);
    const bytes = tokens.flatMap((token) => (notation === "hex" ? hexadecimal(token) : decimal(token)));
    return Uint8Array.from(bytes, (byte) => byte & 255);
  }

  function hexadecimal(token) {
    const digits = token.replace(/^0x/i, "");
    if (!/^([0-9a-f]{2})+$/i.test(digits)) fail(`${token} is not made of bytes of two hexadecimal digits; for numbers from 0 to 255 choose decimal`);
    return digits.match(/../g).map((pair) => parseInt(pair, 16));
  }

  function decimal(token) {
    const value = Number(token);
    if (!/^-?\d{1,3}$/.test(token) || value < -128 || value > 255) fail(`${token} is no byte from -128 to 255; for two digits from 00 to ff choose hex`);
    return [value];
  }

  // ---- .npy files ----

  const NUMBERS = {
    f4: (view, i) => view.getUint32(4 * i, true),
    f2: (view, i) => mx.bitsOf(half(view.getUint16(2 * i, true))),
    V2: (view, i) => (view.getUint16(2 * i, true) << 16) >>> 0, // bfloat16 of ml_dtypes
  };
  const BYTES = ["u1", "i1", "V1"];

  function half(bits) {
    const [exponent, mantissa] = [(bits >> 10) & 31, bits & 1023];
    const magnitude = exponent === 31 ? (mantissa ? NaN : Infinity)
      : exponent ? (1 + mantissa / 1024) * mx.exp2(exponent - 15) : mantissa * mx.exp2(-24);
    return bits >> 15 ? -magnitude : magnitude;
  }

  /** What a .npy file holds: its shape, and `words` of float32 or `bytes`. */
  function readNpy(buffer, name) {
    const start = new Uint8Array(buffer, 0, Math.min(12, buffer.byteLength));
    if (String.fromCharCode(...start.slice(1, 6)) !== "NUMPY" || start[0] !== 0x93) fail(`${name} is no .npy file: write it with np.save`);
    const view = new DataView(buffer);
    const [size, from] = start[6] === 1 ? [view.getUint16(8, true), 10] : [view.getUint32(8, true), 12];
    const header = new TextDecoder().decode(new Uint8Array(buffer, from, size));
    const found = /'descr': '([<>|=]?)(\w+)', 'fortran_order': (True|False), 'shape': \(([^)]*)\)/.exec(header);
    if (!found) fail(`${name} has fields or a shape that the page does not read: ${header.trim()}`);
    const [, order, type, fortran, dimensions] = found;
    const shape = dimensions.split(",").filter((each) => each.trim()).map(Number);
    if (fortran === "True" && shape.length > 1) fail(`${name} is stored by columns: save np.ascontiguousarray(x)`);
    const count = shape.reduce((product, each) => product * each, 1);
    const data = new DataView(buffer, from + size);
    if (BYTES.includes(type)) return { shape, name, bytes: new Uint8Array(buffer.slice(from + size, from + size + count)) };
    if (!NUMBERS[type] || order === ">") fail(`${name} holds ${order}${type}: the page reads float32, float16, bfloat16, and one-byte types; convert with x.astype(np.float32), a view of codes with .view(np.uint8)`);
    if (count > LIMIT) fail(`${name} has ${count} numbers, more than ${LIMIT}: save some of its rows, or use mxref compare`);
    return { shape, name, words: Uint32Array.from({ length: count }, (_, i) => NUMBERS[type](data, i)) };
  }

  // ---- comparison ----

  /** The codes of a block under a scale byte that is given, one per byte. */
  function codesUnder(block, byte, state) {
    const { treatment, element, scale, format } = block;
    if (byte === format.scale.nan) return new Uint8Array(block.k);
    return Uint8Array.from(block.elements, (e, i) => {
      const { m, unit } = mx.ratio(e.yBits, byte, treatment, scale);
      const R = treatment.sr_bits;
      const r = treatment.rounding === "sr" ? mx.draw(state.stream, state.at + BigInt(block.first + i), R).r : null;
      const code = mx.roundMagnitude(m, unit, treatment.rounding, element, r, R);
      return mx.signed(code, e.yBits >>> 31 === 1, element);
    });
  }

  /** Other orders of 4-bit codes in a block's bytes, with the name that mxref layout has for each. */
  const ORDERS = {
    high_first: (packed) => packed.map((byte) => ((byte << 4) | (byte >> 4)) & 255),
    halves: (packed) => {
      const half = packed.length;
      return mx.pack(Uint8Array.from({ length: 2 * half }, (_, i) => (packed[i % half] >> (i < half ? 0 : 4)) & 15), 4);
    },
  };

  const equal = (one, other) => one.length === other.length && one.every((each, i) => each === other[i]);
  const sameBlock = (block, theirs) => (theirs.scale ?? block.scale.byte) === block.scale.byte && (!theirs.packed || equal(block.packed, theirs.packed));

  /**
   * What differs between a block and the kernel's `scale` and `packed` bytes, either of which may be null: the first
   * step that shows it, or null; which bytes and codes; and the codes under the kernel's own scale byte.
   */
  function difference(block, theirs, state) {
    const scale = theirs.scale !== null && theirs.scale !== block.scale.byte;
    const packed = theirs.packed ?? block.packed;
    const bytes = Array.from(packed, (byte, i) => byte !== block.packed[i]);
    const own = mx.unpack(packed, block.element.bits);
    const codes = Array.from(own, (code, i) => code !== block.codes[i]);
    const out = { scale, bytes, codes, own, step: null, order: null, under: null };
    if (!scale && !bytes.includes(true)) return out;
    out.step = scale ? "scale" : "elements";
    if (scale && theirs.packed) out.under = Array.from(codesUnder(block, theirs.scale, state), (code, i) => code !== own[i]).filter(Boolean).length;
    if (!scale && block.element.bits === 4) {
      out.order = Object.keys(ORDERS).find((name) => equal(ORDERS[name](packed), block.packed)) ?? null;
      if (out.order) out.step = "memory";
    }
    return out;
  }

  /** The treatments that differ from another in one choice, and the dialects; random roundings and signs are left out. */
  function others(treatment) {
    const { format } = treatment;
    const { scale } = mx.FORMATS[format];
    const made = Object.keys(mx.DIALECTS).filter((name) => link.takes(format, name)).map((name) => ["dialect", name, link.inDialect(name, format)])
      .filter(([, , each]) => each.format === format && each.rounding !== "sr");
    const choices = {
      scale_rule: mx.rulesOf(format), rounding: ["rne", "rna", "rtz"], hadamard: [0, ...mx.SIZES], zero_scale: mx.zeroScalesOf(format),
      prescale: scale.powers ? [false, true] : [false], arithmetic: mx.arithmeticsOf(format), four_over_six: mx.choicesOf(format),
    };
    for (const [key, values] of Object.entries(choices)) {
      for (const value of values) {
        if (value === treatment[key]) continue;
        const changed = { ...treatment, [key]: value };
        if (key === "hadamard") Object.assign(changed, { signs: "none", sign_vector: "" });
        if (key === "arithmetic") Object.assign(changed, { zero_scale: 0, four_over_six: "off" });
        try {
          made.push([key, value, link.checkTreatment(changed)]);
        } catch (error) {
          if (!(error instanceof link.LinkError)) throw error; // two choices that do not go together
        }
      }
    }
    return made;
  }

  /** The other treatments under which the kernel's bytes of the block are right: triples of key, value and treatment. */
  function explanations(state, treatment, theirs) {
    const shown = others(treatment).filter(([, , each]) => sameBlock(explain.block(state, each), theirs));
    const changed = shown.filter(([key]) => key !== "dialect");
    return changed.length ? changed : shown;
  }

  /** Codes as stored and scale bytes of a whole array under a treatment; its rows are filled up to whole tiles. */
  function quantized(array, treatment, stream, amax) {
    const { rows, length, words } = array;
    const { k, element } = mx.FORMATS[treatment.format];
    const unit = Math.max(k, treatment.hadamard);
    if (length % unit) fail(`rows of ${length} numbers are no multiple of ${unit}: fill them up with zeros`);
    const tile = mx.rowsOf(treatment);
    const height = Math.ceil(rows / tile) * tile;
    const filled = new Uint32Array(height * length);
    filled.set(words);
    const n = treatment.hadamard;
    const negative = n ? mx.signVector(n, treatment.signs, stream, treatment.sign_vector) : [];
    const starts = Array.from({ length: height }, (_, row) => BigInt(row * length));
    const made = mx.quantize(filled, length, treatment, negative, { stream, starts, others: 0, ...(amax !== null && { A: amax }) });
    return { packed: mx.pack(made.codes.subarray(0, words.length), element.bits), scales: made.scales.subarray(0, words.length / k), A: made.A };
  }

  /** The numbers of the blocks of an array whose bytes differ, in order, and the tensor's amax. */
  function wrongBlocks(array, codes, scales, treatment, stream, amax) {
    const { k, element } = mx.FORMATS[treatment.format];
    const size = (k * element.bits) / 8;
    const count = array.words.length / k;
    if (scales && scales.length !== count) fail(`${count} blocks of ${k} have ${count} scale bytes, and there are ${scales.length}`);
    if (codes && codes.length !== count * size) fail(`${count} blocks of ${k} have ${count * size} bytes of codes, and there are ${codes.length}`);
    const want = quantized(array, treatment, stream, amax);
    const wrong = [];
    for (let b = 0; b < count; b++) {
      const same = (!scales || scales[b] === want.scales[b]) && (!codes || equal(codes.subarray(b * size, (b + 1) * size), want.packed.subarray(b * size, (b + 1) * size)));
      if (!same) wrong.push(b);
    }
    return { wrong, count, A: want.A };
  }

  return { LIMIT, KernelError, parseBytes, readNpy, difference, explanations, wrongBlocks };
})();
