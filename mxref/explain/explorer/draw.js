// The drawings: bits of amax, where the rules turn, elements on their grid, one element in its interval.
"use strict";

const draw = (() => {
  const { h, s } = ui;

  /** The 32 bits of a float32, its fields apart. */
  function floatBits(word, label) {
    const bits = word.toString(2).padStart(32, "0");
    const field = (name, from, to, text) => h("span", { class: `part ${name}` },
      h("span", { class: "bits" }, [...bits.slice(from, to)].map((bit) => h("i", {}, bit))), h("small", {}, text));
    return h("div", { class: "float", role: "img", "aria-label": `${label}: bits 0x${link.hex(word)}` },
      field("sign", 0, 1, "\u00b1"), field("exponent", 1, 9, "E"), field("mantissa", 9, 32, "m"));
  }

  /** Where amax lies between two powers of two, and the byte that each rule gives on either side of its turn. */
  function binade(block, onRule) {
    const { scale, element, treatment } = block;
    const at = scale.m / 0x800000;
    const rows = words.rules(treatment).map((rule) => {
      const turn = Math.min(mx.turn(rule, element) / 0x800000, 1);
      const byteOf = (u) => mx.scaleOf(u >>> 0, { ...treatment, scale_rule: rule }, scale).byte;
      const low = byteOf(Math.max(scale.E << 23 >>> 0, 1));
      const high = turn < 1 ? byteOf((scale.E << 23) | 0x7fffff) : low;
      const width = rule === "ceil" ? 0.008 : turn;
      return h("button", {
        type: "button", class: "rule", "aria-pressed": String(rule === treatment.scale_rule), "data-key": `rule-${rule}`,
        onclick: () => onRule(rule), title: words.upWhen(rule, element) ? `one more where ${words.upWhen(rule, element)}` : "never one more",
      },
      h("span", { class: "name" }, words.ruleName(rule)),
      h("span", { class: "line" },
        h("span", { class: at < width / 2 ? "low right" : "low", style: `width:${width * 100}%` }, width > 0.1 ? ui.hex2(low) : ""),
        h("span", { class: at > (1 + width) / 2 ? "high" : "high right", style: `width:${(1 - width) * 100}%` }, width < 0.9 ? ui.hex2(high) : ""),
        h("span", { class: "mark", style: `left:${at * 100}%` })),
      h("span", { class: "byte" }, ui.hex2(byteOf(scale.u))));
    });
    const low = scale.E === 0 ? "0" : words.power(scale.E - 127);
    return h("div", { class: "binade" }, rows,
      h("div", { class: "axis", "aria-hidden": "true" }, h("span", {}, low), h("span", {}, `a = ${numbers.show(scale.amax)}`),
        h("span", {}, words.power(Math.max(scale.E, 1) - 126))));
  }

  /** Where a scaled magnitude stands on the drawing's line, 0 to 1: linear for a short grid, by code for a long one. */
  function position(v, element) {
    const end = mx.exp2(element.emax + 1);
    if (element.grid.length <= 16) return Math.min(v / end, 1);
    const code = mx.below(v, 1, element.grid);
    const l = element.grid[code];
    const next = code < element.maxCode ? element.grid[code + 1] : end;
    return Math.min((code + Math.min((v - l) / (next - l), 1)) / (element.maxCode + 1), 1);
  }

  /** Where the numbers that get a code begin and end, under a rounding; SR has no such places. */
  function bin(code, rounding, element) {
    const { grid, maxCode } = element;
    const between = (low) => (rounding === "rtz" || rounding === "sr" ? grid[low + 1] : (grid[low] + grid[low + 1]) / 2);
    return [code ? between(code - 1) : 0, code < maxCode ? between(code) : mx.exp2(element.emax + 1)];
  }

  const PAD = 14;

  /** The colours of a gap under SR, where the share of elements that go up grows evenly. */
  const blend = (from, to) => s("linearGradient", { id: `from-${from}` },
    s("stop", { class: `stop ${from}`, offset: 0 }), s("stop", { class: `stop ${to}`, offset: 1 }));

  /** The grid as a line, the numbers that get each code as bands, and the elements as dots; hollow ones are negative. */
  function grid(width, block, selected) {
    const { element, treatment } = block;
    const long = element.grid.length > 16;
    const base = 128;
    const height = base + 42;
    const px = (v) => PAD + position(v, element) * (width - 2 * PAD);
    const bands = element.grid.map((_, code) => {
      const [from, to] = bin(code, treatment.rounding, element);
      if (treatment.rounding === "sr" && code < element.maxCode) {
        return s("rect", { fill: `url(#from-${code % 2 ? "odd" : "even"})`, x: px(element.grid[code]), y: 8, width: px(element.grid[code + 1]) - px(element.grid[code]), height: base - 8 });
      }
      return s("rect", { class: code % 2 ? "band odd" : "band even", x: px(from), y: 8, width: Math.max(px(to) - px(from), 0), height: base - 8 });
    });
    const over = s("rect", { class: "over", x: px(element.M), y: 8, width: width - PAD - px(element.M), height: base - 8 });
    const shown = element.grid.map((value, code) => ({ value, code })).filter(({ value, code }) =>
      !long || code === 0 || code === element.maxCode || isLabelled(value, code, element, width < 500));
    const counts = new Map();
    for (const e of block.elements) if (e.kind !== "nan") counts.set(e.magnitude, (counts.get(e.magnitude) || 0) + 1);
    const ticks = shown.map(({ value, code }) => s("g", {},
      s("line", { class: "tick", x1: px(value), x2: px(value), y1: base, y2: base + 5 }),
      s("text", { x: px(value), y: base + 18, class: "label" }, long ? powerText(value, element) : String(value)),
      !long && s("text", { x: px(value), y: base + 34, class: "count" }, counts.get(code) ? `\u00d7${counts.get(code)}` : "")));
    const stacks = new Map();
    const dots = block.elements.filter((e) => e.kind !== "nan").map((e) => {
      const x = px(e.v);
      const column = Math.round(x / 9);
      const level = stacks.get(column) || 0;
      stacks.set(column, level + 1);
      return s("circle", {
        class: `dot ${e.kind}${e.yBits >>> 31 ? " negative" : ""}${e.position === selected ? " selected" : ""}`,
        cx: x, cy: Math.max(base - 8 - level * 10, 13), r: e.position === selected ? 5.5 : 4, "data-element": e.position,
      });
    });
    return s("svg", { class: "grid", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `the scaled magnitudes on the grid of ${element.name}` },
    treatment.rounding === "sr" && s("defs", {}, blend("even", "odd"), blend("odd", "even")), bands, over, s("line", { class: "axis", x1: PAD, x2: width - PAD, y1: base, y2: base }), ticks,
    s("text", { x: width - PAD, y: 20, class: "label end" }, `above ${element.M}: saturates`), dots);
  }

  /** Whether a point of a long grid is named below it: some powers of two, or some even steps of a uniform grid. */
  function isLabelled(value, code, element, narrow) {
    if (!element.exponentBits) return code % (narrow ? 32 : 16) === 0;
    return Math.log2(value) % (narrow ? 4 : 2) === 0 && code >> element.p > 0;
  }

  function powerText(value, element) {
    if (value === 0 || value === element.M || !element.exponentBits) return value === element.M ? words.brief(value, 4) : String(value);
    const exponent = Math.round(Math.log2(value));
    return exponent >= 0 && exponent < 5 ? String(value) : words.power(exponent);
  }

  /** The quotient of a block between its two neighbours among the scales, each with its byte. */
  function neighbours(width, block) {
    const { scale, format } = block;
    const [low, high] = [format.scale.grid[scale.low], format.scale.grid[scale.high]];
    const top = low === high;
    const [left, right] = [52, width - 52];
    const at = (f) => left + f * (right - left);
    const f = top ? 0 : (scale.quotient - low) / (high - low);
    const half = (low + high) / 2;
    const name = (x, value, code) => [
      s("line", { class: "tick", x1: x, x2: x, y1: 18, y2: 46 }),
      s("text", { class: `label${code === scale.byte ? " strong" : ""}`, x, y: 62 }, words.brief(value, 9)),
      s("text", { class: `label${code === scale.byte ? " strong" : ""}`, x, y: 78 }, `byte ${ui.hex2(code)}`),
    ];
    return s("svg", { class: "grid", width, height: 84, viewBox: `0 0 ${width} 84`, role: "img",
      "aria-label": `the quotient ${words.real(scale.quotient, low, half, high)} between the scales ${low} and ${high}` },
    s("rect", { class: top ? "over" : "band even", x: at(0), y: 24, width: at(top ? 1 : 0.5) - at(0), height: 16 }),
    !top && s("rect", { class: "band odd", x: at(0.5), y: 24, width: at(1) - at(0.5), height: 16 }),
    name(at(0), low, scale.low), !top && name(at(1), high, scale.high),
    !top && s("line", { class: "half", x1: at(0.5), x2: at(0.5), y1: 20, y2: 44 }),
    !top && s("text", { class: "label", x: at(0.5), y: 62 }, words.brief(half, 9)),
    s("circle", { class: `dot selected${scale.tie ? " tie" : ""}`, cx: at(f), cy: 32, r: 6 }),
    s("text", { class: "label strong", x: at(f), y: 14 }, words.real(scale.quotient, low, half, high)));
  }

  /** One element between its two neighbours on the grid: which part of the interval goes down, and which up. */
  function interval(width, e, block) {
    const { treatment, element } = block;
    const sr = treatment.rounding === "sr";
    const height = sr && e.fraction !== null ? 118 : 76;
    const [left, right] = [34, width - 34];
    const at = (f) => left + f * (right - left);
    const top = e.fraction === null;
    const f = top ? 0 : e.fraction;
    const limit = treatment.rounding === "rtz" ? 1 : 0.5;
    const names = [words.brief(e.lower, 9), top ? "" : words.brief(e.upper, 9)];
    const parts = sr || top
      ? [s("rect", { class: top ? "over" : "band even", x: at(0), y: 24, width: at(1) - at(0), height: 16 })]
      : [s("rect", { class: "band even", x: at(0), y: 24, width: at(limit) - at(0), height: 16 }),
        s("rect", { class: "band odd", x: at(limit), y: 24, width: at(1) - at(limit), height: 16 })];
    const drawn = [
      ...parts,
      s("line", { class: "tick", x1: at(0), x2: at(0), y1: 18, y2: 46 }),
      s("text", { class: "label", x: at(0), y: 62 }, names[0]),
      !top && s("line", { class: "tick", x1: at(1), x2: at(1), y1: 18, y2: 46 }),
      !top && s("text", { class: "label", x: at(1), y: 62 }, names[1]),
      !top && !sr && limit < 1 && s("line", { class: "half", x1: at(0.5), x2: at(0.5), y1: 20, y2: 44 }),
      !top && !sr && limit < 1 && s("text", { class: "label", x: at(0.5), y: 62 }, words.brief((e.lower + e.upper) / 2, 9)),
      s("circle", { class: `dot selected ${e.kind}`, cx: at(f), cy: 32, r: 6 }),
      s("text", { class: "label strong", x: Math.min(Math.max(at(f), left), right), y: 14 }, words.ratio(e, 7)),
    ];
    if (sr && !top) {
      const full = mx.exp2(treatment.sr_bits);
      const start = (full - e.T) / full;
      drawn.push(
        s("rect", { class: "band even", x: at(0), y: 78, width: at(start) - at(0), height: 14 }),
        s("rect", { class: "band up", x: at(start), y: 78, width: at(1) - at(start), height: 14 }),
        s("line", { class: "random", x1: at(e.draw.r / full), x2: at(e.draw.r / full), y1: 73, y2: 97 }),
        e.draw.r / full > 0.25 && s("text", { class: "label", x: at(0), y: 110 }, "r = 0"),
        e.draw.r / full < 0.75 && s("text", { class: "label", x: at(1), y: 110 }, words.power(treatment.sr_bits)),
        s("text", { class: "label strong", x: Math.min(Math.max(at(e.draw.r / full), left + 44), right - 44), y: 110 }, `r = ${e.draw.r}`));
    }
    return s("svg", { class: "grid", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `element ${e.position}: ${words.reason(e, block)}` }, drawn);
  }

  return { floatBits, binade, grid, neighbours, interval, bin, position };
})();
