// The state of the page, and its text in the address: docs/reference/explorer.rst describes it.
"use strict";

const link = (() => {
  const OPERANDS = ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"];
  const MAX_WORDS = 256; // the largest Hadamard group, and so all that a block can depend on
  const KEYS = ["x", "a", "b", "block", "others", "amax", "seed", "step", "layer", "operand", "at", "e"];

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
    scale_rule: (text) => text,
    rounding: (text) => choice("rounding", text, mx.ROUNDINGS),
    sr_bits: (text, format) => integer("sr_bits", text, mx.maxBitsOf(format)) || fail("sr_bits = 0 is below 1"),
    block: (text) => text,
    zero_scale: (text) => integer("zero_scale", text, 255),
    prescale: (text) => choice("prescale", text, ["true", "false"]) === "true",
    hadamard: (text) => choice("hadamard", text, [0, ...mx.SIZES]),
    signs: (text) => choice("signs", text, mx.POLICIES),
    arithmetic: (text, format) => choice(`${format}: arithmetic`, text, mx.arithmeticsOf(format)),
    four_over_six: (text, format) => choice(`${format}: four_over_six`, text, mx.choicesOf(format)),
    sign_vector: (text) => (/^[+-]*$/.test(text) ? text : fail(`sign_vector = ${text} is not made of + and -`)),
  };

  /** A treatment from its text: a dialect, then the keys that differ from it, as in amd,hadamard=16. */
  function readTreatment(text) {
    const [dialect, ...changes] = text.split(",");
    if (!Object.hasOwn(mx.DIALECTS, dialect)) fail(`no dialect ${dialect}: known are ${Object.keys(mx.DIALECTS).join(", ")}`);
    const given = {};
    for (const change of changes) {
      const [key, value] = cut(change, "=");
      if (!Object.hasOwn(READERS, key)) fail(`no key ${key} in a treatment: known are ${Object.keys(READERS).join(", ")}`);
      given[key] = decodeURIComponent(value);
    }
    const format = given.format === undefined ? mx.DIALECTS[dialect].format ?? "mxfp4" : READERS.format(given.format);
    const treatment = { ...mx.defaultsOf(format), ...mx.DIALECTS[dialect], format };
    for (const [key, value] of Object.entries(given)) treatment[key] = READERS[key](value, format);
    return checkTreatment(treatment);
  }

  /** Refuse keys that do not go together, or that the format does not have, as the specification does. */
  function checkTreatment(treatment) {
    const { format, scale_rule: rule, block, hadamard, signs, sign_vector: given } = treatment;
    const { scale, k } = mx.FORMATS[format];
    if (!(scale.powers && mx.isThreshold(rule))) choice(`${format} has scales of ${scale.name}: scale_rule`, rule, mx.rulesOf(format));
    if (treatment.prescale && !scale.powers) fail(`${format} has scales of ${scale.name}: prescale is for powers of two`);
    choice(`${format} has scales of ${scale.name}: arithmetic`, treatment.arithmetic, mx.arithmeticsOf(format));
    if (treatment.arithmetic !== "real" && treatment.zero_scale) fail(`zero_scale = ${treatment.zero_scale} beside arithmetic = ${treatment.arithmetic}, which says what a zero block gets`);
    choice(`${format} has scales of ${scale.name}: four_over_six`, treatment.four_over_six, mx.choicesOf(format));
    if (treatment.four_over_six !== "off" && treatment.arithmetic !== "real") fail(`four_over_six = ${treatment.four_over_six} beside arithmetic = ${treatment.arithmetic}`);
    if (treatment.four_over_six !== "off" && !block.startsWith("1x")) fail(`four_over_six = ${treatment.four_over_six} with block = ${block}: the choice depends on all rows of a tile, and the page has one`);
    choice(`${format} has scales of ${scale.name}: zero_scale`, String(treatment.zero_scale), mx.zeroScalesOf(format));
    const shape = /^([0-9]{1,6})x([0-9]+)$/.exec(block);
    if (!shape || Number(shape[2]) !== k || !isPower(Number(shape[1]))) fail(`block = ${block} is not ${mx.blocksOf(format).join(" or ")}, for ${format}`);
    if (signs !== "none" && !hadamard) fail(`signs = ${signs} without a Hadamard transform`);
    if (given && signs !== "none") fail(`sign_vector beside signs = ${signs}`);
    if (given && given.length !== hadamard) fail(`sign_vector has ${given.length} signs, hadamard = ${hadamard}`);
    return treatment;
  }

  const isPower = (n) => Number.isInteger(Math.log2(n));

  /** A treatment in another format: what that format does not have becomes its default. */
  function inFormat(treatment, format) {
    const [from, to] = [mx.FORMATS[treatment.format], mx.FORMATS[format]];
    const usual = mx.defaultsOf(format);
    const rows = mx.rowsOf(treatment);
    return {
      ...treatment, format,
      scale_rule: from.scale.powers === to.scale.powers ? treatment.scale_rule : usual.scale_rule,
      prescale: treatment.prescale && to.scale.powers,
      arithmetic: to.scale.powers ? "real" : treatment.arithmetic,
      four_over_six: to.scale.powers ? "off" : treatment.four_over_six,
      zero_scale: treatment.zero_scale ? to.scale.one : 0,
      block: `${rows === from.k ? to.k : rows}x${to.k}`,
      sr_bits: Math.min(treatment.sr_bits, mx.maxBitsOf(format)),
    };
  }

  /** Whether a format has the choices of a dialect, or the dialect has a format of its own. */
  function takes(format, dialect) {
    const { scale } = mx.FORMATS[format];
    const { format: own, scale_rule: rule, prescale } = mx.DIALECTS[dialect];
    return own || scale.powers || !(rule || prescale);
  }

  /** The treatment of a dialect: in its own format, or in the one that is given. */
  const inDialect = (dialect, format) => inFormat(readTreatment(dialect), mx.DIALECTS[dialect].format ?? format);

  /** The changes from a dialect to a treatment. */
  function changesFrom(dialect, treatment) {
    const base = { ...mx.defaultsOf(treatment.format), format: "mxfp4", ...mx.DIALECTS[dialect] };
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
    const a = readTreatment(given.a ?? "ocp");
    const b = given.b === undefined ? null : readTreatment(given.b);
    const state = {
      words: given.x === undefined ? [0] : readWords(given.x), a, b,
      block: integer("block", given.block ?? "0", MAX_WORDS / mx.FORMATS[a.format].k - 1),
      others: readWord("others", given.others ?? "00000000"),
      amax: given.amax === undefined ? null : checkAmax(readWord("amax", given.amax)),
      stream: {
        seed: integer("seed", given.seed ?? "0", 0xffffffffffffffffn),
        step: integer("step", given.step ?? "0", 0xffffffff),
        layer: integer("layer", given.layer ?? "0", 0xffffff),
        operand: OPERANDS.indexOf(choice("operand", given.operand ?? OPERANDS[0], OPERANDS)),
      },
      at: integer("at", given.at ?? "0", 0xffffffffffffffffn),
      element: integer("e", given.e ?? "0", Math.max(...sides({ a, b }).map((each) => mx.FORMATS[each.format].k)) - 1),
    };
    if (state.amax !== null && !hasAmax(state)) fail("amax is that of a tensor with a scale: no format here has one");
    if (state.block >= blockCount(state)) fail(`block ${state.block} does not exist`);
    return state;
  }

  function readWord(name, text) {
    return /^[0-9a-f]{8}$/i.test(text) ? parseInt(text, 16) : fail(`${name} is not a word of eight hexadecimal digits`);
  }

  /** Refuse a tensor's amax that is no finite magnitude (scale.tensor.amax). */
  function checkAmax(word) {
    if (word >= mx.INFINITY_BITS) fail(`amax = ${numbers.show(mx.valueOf(word))} is no finite magnitude`);
    return word;
  }

  const sides = (state) => [state.a, state.b].filter(Boolean);

  /** Whether a treatment of the state takes the amax of a tensor. */
  const hasAmax = (state) => sides(state).some((each) => mx.FORMATS[each.format].tensorScale);

  /** The length of the row that the page shows: that of the words, filled up as quantize.padding says. */
  function paddedLength(state) {
    const unit = Math.max(...sides(state).flatMap((each) => [mx.FORMATS[each.format].k, each.hadamard]));
    return Math.ceil(Math.max(state.words.length, 1) / unit) * unit;
  }

  /** How many blocks of A the row has. */
  const blockCount = (state) => paddedLength(state) / mx.FORMATS[state.a.format].k;

  function write(state) {
    const { stream } = state;
    const parts = {
      x: wordsText(state.words),
      a: treatmentText(state.a),
      b: state.b ? treatmentText(state.b) : "",
      block: state.block || "",
      others: state.others ? hex(state.others) : "",
      amax: state.amax !== null && hasAmax(state) ? hex(state.amax) : "",
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

  return {
    OPERANDS, MAX_WORDS, LinkError, integer, read, write, readTreatment, treatmentText, checkTreatment, inFormat, inDialect, takes,
    checkAmax, hasAmax, blockCount, hex,
  };
})();
