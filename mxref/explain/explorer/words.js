// The arithmetic of a block in sentences, as `mxref explain` has it.
"use strict";

const words = (() => {
  const { show } = numbers;
  const hex6 = (value) => "0x" + value.toString(16).padStart(6, "0");
  const NAMES = { floor: "FLOOR", ceil: "CEIL", rceil: "RCEIL", even: "EVEN", nearest: "NEAREST", rne: "RNE", rna: "RNA", rtz: "RTZ", sr: "SR" };

  const ARITHMETICS = {
    real: "real numbers", te: "Transformer Engine", te_2_13: "Transformer Engine to 2.13", torchao: "torchao", modelopt: "Model Optimizer",
    compressed_tensors: "compressed-tensors", ggml: "ggml",
  };

  /** A few significant digits, for what is no float32. */
  function brief(value, digits = 4) {
    if (value === null) return "-";
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value < 0 ? "-\u221e" : "\u221e";
    return String(Number(value.toPrecision(digits)));
  }

  /**
   * A real number in seven digits, or in more where these are those of a point that decides, as the middle between two
   * neighbours, and the number is not.
   */
  function real(value, ...points) {
    const text = brief(value, 7);
    return points.some((point) => Number(text) === point && value !== point) ? brief(value, 13) : text;
  }

  /** A power of two as text, with a raised exponent. */
  const power = (n) => `2${String(n).replace("-", "\u207b").replace(/\d/g, (d) => "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[d])}`;

  /** Whether the exponent goes up at the turn itself. */
  const closed = (rule) => rule === "floor" || rule === "even" || rule.startsWith(">=");
  const ruleName = (rule) => NAMES[rule] ?? rule;
  /** The part of the rule's clause that tells it. */
  const ruleKind = (rule) => (mx.isThreshold(rule) ? "threshold" : rule);
  /** The rules that the page offers: those of the format, and a threshold that the address gives. */
  const rules = ({ format, scale_rule: rule }) => [...new Set([...mx.rulesOf(format), rule])];

  /** The value of a block's scale as text. */
  const scaleText = ({ format, scale }) =>
    (scale.isNaN ? "NaN" : format.scale.powers ? power(scale.byte - format.scale.bias) : String(scale.X));

  /** What a magnitude is divided by, as text. */
  const divisor = (block) => (block.format.tensorScale ? `(${scaleText(block)} t)` : scaleText(block));

  function upWhen(rule, element) {
    const turn = mx.turn(rule, element);
    if (turn === 0x800000) return null;
    if (rule === "ceil") return "m \u2260 0";
    return closed(rule) ? `m \u2265 ${hex6(turn)}` : `m > ${hex6(turn - 1)}`;
  }

  /** The interval of a / X that a rule gives, and whether its upper end saturates. */
  function range(rule, element) {
    const turn = mx.turn(rule, element);
    const start = 1 + (closed(rule) ? turn : turn - 1) / 0x800000;
    const low = start * mx.exp2(element.emax - 1);
    const high = start * mx.exp2(element.emax);
    const interval = closed(rule) ? `[${low}, ${high})` : `(${low}, ${high}]`;
    return high > element.M ? `${interval}: above ${element.M} saturates` : interval;
  }

  /** How the shared scale was chosen: sentences in order. */
  function scaleLines(block) {
    const { scale, element, treatment } = block;
    const symbol = block.n ? "y" : "x";
    const where = scale.at < 0 ? "in another row of the tile" : `at element ${scale.at}`;
    const bits = "0x" + link.hex(scale.u);
    if (scale.kind === "nonfinite") {
      return [
        `${scale.u > mx.INFINITY_BITS ? "NaN" : "Inf"} ${where} (u = ${bits} \u2265 0x7f800000): no rule applies.`,
        `The byte is ${scale.byte}, which is NaN, and all codes are 0.`,
      ];
    }
    const { arithmetic } = treatment;
    if (scale.kind === "zero" && arithmetic !== "real") {
      return ["Every element is zero (u = 0).", ...tensorLines(block), `${ARITHMETICS[arithmetic]} stores for it byte ${scale.byte}, X = ${scaleText(block)}.`];
    }
    if (scale.kind === "zero") {
      return [
        "Every element is zero (u = 0): no rule applies.",
        `The policy zero_scale = ${treatment.zero_scale} gives byte ${scale.byte}, X = ${scaleText(block)}.` +
          (element.complement ? "" : " Codes keep the signs of their zeros."),
      ];
    }
    if (scale.kind === "nearest") {
      return [`a = max |${symbol}| = ${show(scale.amax)}, ${where}.`, ...tensorLines(block), ...nearestLines(block)];
    }
    const rule = ruleName(treatment.scale_rule);
    const bias = 127 + element.emax;
    const condition = upWhen(treatment.scale_rule, element);
    const lines = [
      `a = max |${symbol}| = ${show(scale.amax)}, ${where}.`,
      `u = ${bits}: E = ${scale.E}, m = ${hex6(scale.m)}${scale.E === 0 ? " (E = 0: subnormal)" : ""}.`,
      condition === null
        ? `${rule}: e = E - 127 - ${element.emax} = ${scale.E} - ${bias} = ${scale.e}.`
        : `${rule}: ${condition} ${scale.bump ? "holds" : "does not hold"}, so e = E - 127 - ${element.emax}` +
          `${scale.bump ? " + 1" : ""} = ${scale.e}.`,
    ];
    const { bias: zero, name } = block.format.scale;
    if (scale.clamped !== scale.e) lines.push(`${scale.e} is beyond what ${name} holds: clamped to e = ${scale.clamped}.`);
    lines.push(`byte = e + ${zero} = ${scale.byte} = 0x${ui.hex2(scale.byte)}, X = ${power(scale.clamped)}.`);
    const ratio = `a / X = ${brief(scale.amax / scale.X, 9)}`;
    lines.push(scale.clamped === scale.e && scale.E > 1
      ? `${ratio}, which ${rule} keeps in ${range(treatment.scale_rule, element)}.` : `${ratio}.`);
    return lines;
  }

  /** The tensor's amax and its scale. */
  function tensorLines({ scale, element, format, treatment }) {
    if (!format.tensorScale) return [];
    const whose = scale.given ? "given" : "of these numbers";
    if (treatment.arithmetic !== "real") {
      return [`The tensor's amax A = ${show(scale.A)}, ${whose}: t = ${show(scale.t)} (0x${link.hex(mx.bitsOf(scale.t))}) in the float32 operations of ${ARITHMETICS[treatment.arithmetic]}.`];
    }
    if (scale.A === 0) return [`The tensor's amax A = 0, ${whose}: t = 1.`];
    const top = treatment.four_over_six === "off" ? format.scale.S : mx.exp2(Math.floor(Math.log2(format.scale.S)));
    const quotient = `A / (${element.M} \u00b7 ${top})`;
    return [`The tensor's amax A = ${show(scale.A)}, ${whose}: t = ${quotient} = ${show(scale.t)}, a float32 (0x${link.hex(mx.bitsOf(scale.t))}).`];
  }

  /** The quotient, its two neighbours among the scales, and the chosen one. */
  function nearestLines(block) {
    const { scale, element, format, treatment } = block;
    const { grid, name, S } = format.scale;
    const over = scale.chosen ? scale.over : element.M;
    const own = treatment.arithmetic === "real" ? null : ARITHMETICS[treatment.arithmetic];
    const [low, high] = [grid[scale.low], grid[scale.high]];
    const unit = format.tensorScale ? `(${over} t)` : over;
    const lines = [`a / ${unit} = ${real(scale.quotient, low, (low + high) / 2, high)}, ${own ? `in the float32 operations of ${own}` : "a real number: it is not rounded before"}.`];
    const chosen = `byte ${scale.byte} = 0x${ui.hex2(scale.byte)}, X = ${scale.X}`;
    const nearer = mx.nearest(scale.quotient, 1, grid);
    if (scale.byte !== nearer) lines.push(`${own} does not take the scale nearest to it, 0x${ui.hex2(nearer)}: ${chosen}.`);
    else if (scale.quotient >= S) lines.push(`${S} is the largest scale of ${name}: ${chosen}.`);
    else if (scale.quotient === low) lines.push(`It is a scale of ${name}: ${chosen}.`);
    else {
      const why = scale.tie ? "halfway, so the even code" : "the nearer";
      lines.push(`It lies between the scales ${low} (0x${ui.hex2(scale.low)}) and ${high} (0x${ui.hex2(scale.high)}): ${why}, ${chosen}.`);
    }
    if (scale.X === 0 && ["te", "te_2_13"].includes(treatment.arithmetic)) {
      return [...lines, "The scale underflows to 0, by which the elements are divided all the same: they saturate."];
    }
    if (scale.chosen) {
      const [six, four] = scale.chosen.both;
      const result = six.error === four.error ? "as large as" : scale.chosen.taken ? "larger than" : "smaller than";
      lines.unshift(`Four over six: the ${treatment.four_over_six} error under a / ${six.over}, byte 0x${ui.hex2(six.byte)}, is ${result} that under a / ${four.over}, byte 0x${ui.hex2(four.byte)}.`);
    }
    if (scale.X === 0) return [...lines, "The scale underflows to 0: every code is 0, with its sign."];
    const ratio = scale.amax / (scale.X * scale.t);
    return [...lines, `a / ${format.tensorScale ? "(X t)" : "X"} = ${real(ratio, element.M)}${ratio > element.M ? `: above ${element.M} saturates` : ""}.`];
  }

  const KINDS = {
    exact: { mark: "=", text: "on the grid" },
    up: { mark: "\u2191", text: "up" },
    down: { mark: "\u2193", text: "down" },
    tie: { mark: "\u25c6", text: "tie" },
    saturated: { mark: "\u25b2", text: "saturated" },
    nan: { mark: "!", text: "NaN block" },
  };

  /** Why an element has its code. */
  function reason(e, block) {
    const { treatment, element } = block;
    if (e.kind === "nan") return "NaN block: code 0";
    if (e.kind === "exact") return "on the grid";
    if (Number.isNaN(e.v)) return "the scale is 0: code 0";
    if (e.kind === "saturated") return `above ${element.M}: saturates`;
    if (e.kind === "tie") return `halfway: ${treatment.rounding === "rne" ? "to the even code" : "away from zero"}`;
    if (treatment.rounding === "sr" && e.T !== undefined) {
      const full = mx.exp2(treatment.sr_bits);
      const total = e.T + e.draw.r;
      return `T + r = ${total} ${total >= full ? "\u2265" : "<"} ${full}: ${e.kind}`;
    }
    if (treatment.rounding === "rtz") return "toward zero";
    return `nearer to ${brief(Math.abs(e.P), 9)}`;
  }

  /** One line of arithmetic for a hovered element. */
  function short(e, block) {
    const symbol = block.n ? "y" : "x";
    const start = `${e.position}: ${symbol} = ${show(e.y)}`;
    if (e.kind === "nan") return `${start}, NaN block, code 0`;
    const factor = block.treatment.prescale ? `${fraction(block.element.prescale)} \u00b7 ` : "";
    if (Number.isNaN(e.v)) return `${start}; ${reason(e, block)}; value ${brief(e.value, 6)}, error ${brief(e.error, 3)}`;
    return `${start}; ${factor}|${symbol}| / ${divisor(block)} = ${ratio(e, 6)}; ${reason(e, block)}; code ${code(e, block)} = ` +
      `${brief(e.P, 9)}; value ${brief(e.value, 6)}, error ${brief(e.error, 3)}`;
  }

  /** The ratio of an element in a few digits, or in as many as tell it from a point that decides. */
  function ratio(e, digits) {
    const text = brief(e.v, digits);
    const long = real(e.v, e.lower, (e.lower + e.upper) / 2, e.upper);
    return long.length > 9 && long !== brief(e.v, 7) ? long : text;
  }

  /** The value of a code in a narrow place: in two's complement the number of its steps. */
  const cell = (e, { element }) => brief(element.complement ? e.P / element.grid[1] : e.P, 9);

  /** The value of a code; in two's complement also as a number of steps. */
  function valueText(e, { element }) {
    const steps = element.complement && e.P !== 0 ? `${element.values[e.code] / element.grid[1]}/${1 / element.grid[1]} = ` : "";
    return steps + brief(e.P, 9);
  }

  const code = (e, block) => e.code.toString(2).padStart(block.element.bits, "0");

  function fraction(value) {
    for (let d = 1; d <= 128; d *= 2) if (Number.isInteger(value * d)) return d === 1 ? String(value) : `${value * d}/${d}`;
    return String(value);
  }

  return { NAMES, ARITHMETICS, ruleName, ruleKind, rules, KINDS, brief, real, ratio, scaleText, divisor, cell, valueText, scaleLines, reason, short, code, fraction, hex6, power, upWhen };
})();
