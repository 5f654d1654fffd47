// The arithmetic of a block in sentences, as `mxref explain` has it.
"use strict";

const words = (() => {
  const { show } = numbers;
  const hex6 = (value) => "0x" + value.toString(16).padStart(6, "0");
  const NAMES = { floor: "FLOOR", ceil: "CEIL", rceil: "RCEIL", even: "EVEN", rne: "RNE", rna: "RNA", rtz: "RTZ", sr: "SR" };

  /** A few significant digits, for what is no float32. */
  function brief(value, digits = 4) {
    if (value === null) return "-";
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value < 0 ? "-\u221e" : "\u221e";
    return String(Number(value.toPrecision(digits)));
  }

  /** A power of two as text, with a raised exponent. */
  const power = (n) => `2${String(n).replace("-", "\u207b").replace(/\d/g, (d) => "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[d])}`;

  /** Whether the exponent goes up at the turn itself. */
  const closed = (rule) => rule === "floor" || rule === "even" || rule.startsWith(">=");
  const ruleName = (rule) => NAMES[rule] ?? rule;
  /** The part of the rule's clause that tells it. */
  const ruleKind = (rule) => (mx.isThreshold(rule) ? "threshold" : rule);
  /** The rules that the page offers: the names, and a threshold that the address gives. */
  const rules = (current) => (mx.isThreshold(current) ? [...mx.RULES, current] : mx.RULES);

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
        "The byte is 255, which is NaN, and all codes are 0.",
      ];
    }
    if (scale.kind === "zero") {
      return [
        "Every element is zero (u = 0): no rule applies.",
        `The policy zero_scale = ${treatment.zero_scale} gives byte ${scale.byte}. Codes keep the signs of their zeros.`,
      ];
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
    if (scale.clamped !== scale.e) lines.push(`${scale.e} is outside -127 to 127: clamped to e = ${scale.clamped}.`);
    lines.push(`byte = e + 127 = ${scale.byte} = 0x${ui.hex2(scale.byte)}, X = ${power(scale.clamped)}.`);
    const ratio = `a / X = ${brief(scale.amax / scale.X, 9)}`;
    lines.push(scale.clamped === scale.e && scale.E > 1
      ? `${ratio}, which ${rule} keeps in ${range(treatment.scale_rule, element)}.` : `${ratio}.`);
    return lines;
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
    const X = power(block.scale.byte - 127);
    return `${start}; ${factor}|${symbol}| / ${X} = ${brief(e.v, 6)}; ${reason(e, block)}; code ${code(e, block)} = ` +
      `${brief(e.P, 9)}; value ${brief(e.value, 6)}, error ${brief(e.error, 3)}`;
  }

  const code = (e, block) => e.code.toString(2).padStart(block.element.bits, "0");

  function fraction(value) {
    for (let d = 1; d <= 16; d *= 2) if (Number.isInteger(value * d)) return d === 1 ? String(value) : `${value * d}/${d}`;
    return String(value);
  }

  return { NAMES, ruleName, ruleKind, rules, KINDS, brief, scaleLines, reason, short, code, fraction, hex6, power, upWhen };
})();
