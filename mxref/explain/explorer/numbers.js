// Numbers that people type, presets, and generators.
"use strict";

const numbers = (() => {
  const word = (value) => mx.bitsOf(Math.fround(value));
  const below = (value) => mx.valueOf(mx.bitsOf(value) - 1);
  const above = (value) => mx.valueOf(mx.bitsOf(value) + 1);

  /** The words of pasted text: decimals, nan, inf, or float32 bits as 0x3f800000, however they are separated. */
  function parse(text) {
    const cleaned = text.replace(/\b(tensor|array|np|numpy|torch|dtype)\b[.=(]*|\b(b?float)\d+\b/g, " ");
    const tokens = cleaned.split(/[\s,;()[\]{}|]+/).filter(Boolean);
    if (!tokens.length) throw new Error("no number in the text");
    if (tokens.length > link.MAX_WORDS) throw new Error(`${tokens.length} numbers, more than ${link.MAX_WORDS}`);
    return tokens.map(parseOne);
  }

  function parseOne(token) {
    const text = token.toLowerCase();
    if (/^0x[0-9a-f]{1,8}$/.test(text)) return parseInt(text, 16);
    const special = /^([+-]?)(nan|inf|infinity)$/.exec(text);
    if (special) {
      const magnitude = special[2] === "nan" ? 0x7fc00000 : mx.INFINITY_BITS;
      return special[1] === "-" ? (magnitude | 0x80000000) >>> 0 : magnitude;
    }
    if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(text)) {
      throw new Error(`${token} is no float32 number: write decimals, nan, inf, -0, or bits as 0x7fc00000`);
    }
    const value = Math.fround(Number(text));
    if (!Number.isFinite(value)) throw new Error(`${token} is beyond float32: write inf for infinity`);
    return mx.bitsOf(value);
  }

  /** A float32 in the fewest digits that name it, as text. */
  function show(value) {
    if (Number.isNaN(value)) return "nan";
    if (!Number.isFinite(value)) return value < 0 ? "-inf" : "inf";
    if (Object.is(value, -0)) return "-0";
    for (let digits = 1; digits <= 9; digits++) {
      const text = value.toPrecision(digits);
      if (Math.fround(Number(text)) === value) return String(Number(text));
    }
    return String(value);
  }

  /** Uniform numbers in (0, 1), from Philox, so that a draw has a number. */
  function uniform(drawNumber) {
    let call = 0;
    let words = [];
    return () => {
      if (!words.length) words = mx.philox([call++, 0, 0, 0x6d78], [drawNumber, 0]);
      return (words.shift() + 0.5) / 0x100000000;
    };
  }

  function gauss(random) {
    return Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random());
  }

  const COUNT = 32; // numbers that a preset has and a generator draws

  const GENERATORS = {
    normal: (random) => Array.from({ length: COUNT }, () => gauss(random)),
    laplace: (random) => Array.from({ length: COUNT }, () => {
      const u = random() - 0.5;
      return -Math.sign(u) * Math.log(1 - 2 * Math.abs(u));
    }),
    outlier: (random) => {
      const values = GENERATORS.normal(random);
      values[Math.floor(random() * COUNT)] *= 32;
      return values;
    },
  };

  /** 32 words from a generator; the same number gives the same words. */
  const generate = (name, drawNumber) => GENERATORS[name](uniform(drawNumber)).map(word);

  /** The amax of a tensor under which the preset `ties` is one in NVFP4 too: t and the first scale are 1. */
  const TIES_AMAX = word(6 * 448);

  const both = (values) => values.flatMap((value) => [value, -value]);
  const PRESETS = {
    normal: () => generate("normal", 3),
    ties: () => [
      ...both([5, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 6]), above(0.25), below(0.25), above(2.5), below(2.5),
      above(3.5), below(3.5), below(5), 0.3, 0, -0, 0.1, -0.1, 4, -4, 7, 1,
    ].map(word),
    tiny: () => [
      ...both([1.5, 1.25, 1, 0.75, 0.5, 0.375, 0.25, 0.125]).map((value) => value * mx.exp2(-126)),
      ...both([1, 2, 3, 5, 1 << 20, 1 << 21, 1 << 22, 3 << 20]).map((value) => value * mx.exp2(-149)),
    ].map(word),
    nan: () => generate("normal", 3).map((each, i) => (i === 9 ? 0x7fc00000 : each)),
    outlier: () => generate("outlier", 27),
    turn: () => generate("normal", 3).map((each, i) => (i === 12 ? word(below(3.5)) : each)),
  };

  return { parse, parseOne, show, generate, GENERATORS: Object.keys(GENERATORS), PRESETS, TIES_AMAX };
})();
