// The state of the page, and its text in the address: docs/reference/explorer.rst describes it.
"use strict";

const link = (() => {
  const OPERANDS = ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"];
  const MAX_WORDS = 256; // the largest Hadamard group, and so all that a block can depend on
  const KEYS = ["x", "a", "b", "block", "others", "seed", "step", "layer", "operand", "at", "e"];

  class LinkError extends Error {}

  function fail(message) {
    throw new LinkError(message);
  }

  /** An integer from 0 to `last`, which is BigInt for those beyond 2^53. */
  function integer(name, text, last) {
    if (!/^[0-9]{1,20}$/.test(text)) fail(`${name} = ${text} is not a whole number`);
    const value = BigInt(text);
    if (value > BigInt(last)) fail(`${name} = ${text} is above ${last}`);
    return typeof last === "bigint" ? value : Number(value);
  }

  function choice(name, text, known) {
    if (!known.map(String).includes(text)) fail(`${name} = ${text} is not one of ${known.join(", ")}`);
    return typeof known[0] === "number" ? Number(text) : text;
  }

  const READERS = {
    format: (text) => choice("format", text, Object.keys(mx.FORMATS)),
    scale_rule: (text) => (mx.isThreshold(text) ? text : choice("scale_rule", text, mx.RULES)),
    rounding: (text) => choice("rounding", text, mx.ROUNDINGS),
    sr_bits: (text) => integer("sr_bits", text, mx.MAX_SR_BITS) || fail("sr_bits = 0 is below 1"),
    block: (text) => choice("block", text, mx.BLOCKS),
    zero_scale: (text) => choice("zero_scale", text, [0, 127]),
    prescale: (text) => choice("prescale", text, ["true", "false"]) === "true",
    hadamard: (text) => choice("hadamard", text, [0, ...mx.SIZES]),
    signs: (text) => choice("signs", text, mx.POLICIES),
    sign_vector: (text) => (/^[+-]*$/.test(text) ? text : fail(`sign_vector = ${text} is not made of + and -`)),
  };

  /** A treatment from its text: a dialect, then the keys that differ from it, as in amd,hadamard=16. */
  function readTreatment(text) {
    const [dialect, ...changes] = text.split(",");
    if (!Object.hasOwn(mx.DIALECTS, dialect)) fail(`no dialect ${dialect}: known are ${Object.keys(mx.DIALECTS).join(", ")}`);
    const treatment = { ...mx.DEFAULTS, ...mx.DIALECTS[dialect] };
    for (const change of changes) {
      const [key, value] = cut(change, "=");
      if (!Object.hasOwn(READERS, key)) fail(`no key ${key} in a treatment: known are ${Object.keys(READERS).join(", ")}`);
      treatment[key] = READERS[key](decodeURIComponent(value));
    }
    return checkTreatment(treatment);
  }

  /** Refuse keys that do not go together, as the specification does (hadamard.vector, hadamard.policy). */
  function checkTreatment(treatment) {
    const { hadamard, signs, sign_vector: given } = treatment;
    if (signs !== "none" && !hadamard) fail(`signs = ${signs} without a Hadamard transform`);
    if (given && signs !== "none") fail(`sign_vector beside signs = ${signs}`);
    if (given && given.length !== hadamard) fail(`sign_vector has ${given.length} signs, hadamard = ${hadamard}`);
    return treatment;
  }

  /** The changes from a dialect to a treatment. */
  function changesFrom(dialect, treatment) {
    const base = { ...mx.DEFAULTS, ...mx.DIALECTS[dialect] };
    return Object.keys(base).filter((key) => base[key] !== treatment[key]);
  }

  function treatmentText(treatment) {
    const names = Object.keys(mx.DIALECTS);
    const nearest = names.reduce((best, name) =>
      changesFrom(name, treatment).length < changesFrom(best, treatment).length ? name : best);
    const changed = changesFrom(nearest, treatment).map((key) => `${key}=${encodeURIComponent(treatment[key])}`);
    return [nearest, ...changed].join(",");
  }

  function readWords(text) {
    if (!/^([0-9a-f]{8})+$/i.test(text)) fail("x is not made of words of eight hexadecimal digits");
    if (text.length > 8 * MAX_WORDS) fail(`x has ${text.length / 8} words, more than ${MAX_WORDS}`);
    return text.match(/.{8}/g).map((word) => parseInt(word, 16));
  }

  const hex = (word) => word.toString(16).padStart(8, "0");

  function wordsText(words) {
    let count = words.length;
    while (count > 1 && words[count - 1] === 0) count--;
    return words.slice(0, count).map(hex).join("");
  }

  const cut = (text, mark) => {
    const at = text.indexOf(mark);
    return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
  };

  /** The state that an address names; what it leaves out has its default. A LinkError says what is wrong. */
  function read(hash) {
    const given = {};
    for (const part of hash.replace(/^#/, "").split("&").filter(Boolean)) {
      const [key, value] = cut(part, "=");
      if (!KEYS.includes(key)) fail(`no key ${key}: known are ${KEYS.join(", ")}`);
      given[key] = value;
    }
    const state = {
      words: given.x === undefined ? [0] : readWords(given.x),
      a: readTreatment(given.a ?? "ocp"),
      b: given.b === undefined ? null : readTreatment(given.b),
      block: integer("block", given.block ?? "0", MAX_WORDS / mx.K - 1),
      others: /^[0-9a-f]{8}$/i.test(given.others ?? "00000000")
        ? parseInt(given.others ?? "0", 16) : fail("others is not a word of eight hexadecimal digits"),
      stream: {
        seed: integer("seed", given.seed ?? "0", 0xffffffffffffffffn),
        step: integer("step", given.step ?? "0", 0xffffffff),
        layer: integer("layer", given.layer ?? "0", 0xffffff),
        operand: OPERANDS.indexOf(choice("operand", given.operand ?? OPERANDS[0], OPERANDS)),
      },
      at: integer("at", given.at ?? "0", 0xffffffffffffffffn),
      element: integer("e", given.e ?? "0", mx.K - 1),
    };
    if (state.block * mx.K >= paddedLength(state)) fail(`block ${state.block} does not exist`);
    return state;
  }

  /** The length of the row that the page shows: that of the words, filled up as quantize.padding says. */
  function paddedLength(state) {
    const unit = Math.max(mx.K, state.a.hadamard, state.b ? state.b.hadamard : 0);
    return Math.ceil(Math.max(state.words.length, 1) / unit) * unit;
  }

  function write(state) {
    const { stream } = state;
    const parts = {
      x: wordsText(state.words),
      a: treatmentText(state.a),
      b: state.b ? treatmentText(state.b) : "",
      block: state.block || "",
      others: state.others ? hex(state.others) : "",
      seed: stream.seed || "",
      step: stream.step || "",
      layer: stream.layer || "",
      operand: stream.operand ? OPERANDS[stream.operand] : "",
      at: state.at || "",
      e: state.element || "",
    };
    const given = Object.entries(parts).filter(([, value]) => value !== "");
    return "#" + given.map(([key, value]) => `${key}=${value}`).join("&");
  }

  return { OPERANDS, MAX_WORDS, LinkError, integer, read, write, readTreatment, treatmentText, checkTreatment, paddedLength, hex };
})();
