// The steps of the page, each drawn from the explained blocks A and B.
"use strict";

const steps = (() => {
  const { h } = ui;

  const sideOf = (app) => (app.blocks.b ? { name: app.side, text: app.side.toUpperCase() } : null);

  /** The signs and the transform. */
  function transform(node, app) {
    const block = app.block;
    const { n, treatment } = block;
    const head = ui.head(2, "Signs and Hadamard", n
      ? `Groups of ${n}: first the signs d, then the transform, one float32 operation at a time.`
      : "No transform in this treatment: y = x.",
    n ? ["hadamard.signs", "hadamard.order", "hadamard.factor"] : ["hadamard.size"], sideOf(app));
    if (!n) return ui.replace(node, head);
    const signs = block.elements.map((e) => h("span", { class: e.negative ? "minus" : "plus", "data-element": e.position }, e.negative ? "\u2212" : "+"));
    app.turned ??= bars.plot("the numbers of the block after the transform");
    app.turned.draw(block.elements.map((e) => e.yBits), app.element, bars.flips(block));
    return ui.replace(node, head,
      h("div", { class: "caption" }, "signs d"), h("div", { class: "signs" }, signs),
      h("div", { class: "caption" }, "y, with the magnitudes at which the scale byte changes"), app.turned.node,
      n > block.k && h("p", { class: "quiet" }, `A group of ${n} is longer than the block. Numbers that are not given are +0.`));
  }

  /** Amax, rule and scale byte. */
  function scale(node, app) {
    const block = app.block;
    const special = { nonfinite: ["scale.nonfinite"], zero: ["scale.zero"] }[block.scale.kind];
    const tile = mx.rowsOf(block.treatment) > 1 ? ["scale.block.tile"] : [];
    const { powers, name } = block.format.scale;
    const real = block.treatment.arithmetic === "real";
    const rule = real ? [`scale.rule.${words.ruleKind(block.treatment.scale_rule)}`, powers ? "scale.clamp" : "scale.underflow"] : ["scale.arithmetic"];
    if (block.treatment.four_over_six !== "off") rule.push("scale.four_over_six");
    const sentence = powers
      ? "One power of two for the block, from the bits of its largest magnitude."
      : `One scale of ${name} for the block: its largest magnitude over the largest element and the tensor's scale, ${real ? "rounded once" : "each operation in float32"}.`;
    ui.replace(node,
      ui.head(3, "Amax, rule, scale byte", sentence,
        ["scale.amax", ...(block.format.tensorScale ? ["scale.tensor"] : []), ...(special ?? rule), ...tile], sideOf(app)),
      h("div", { class: "columns" },
        h("div", {}, block.scale.kind !== "nearest" && draw.floatBits(block.scale.u, "u"), h("ol", { class: "lines" }, words.scaleLines(block).map((line) => h("li", {}, line)))),
        h("div", {}, chosen(block, app))));
  }

  /** The drawing of the choice: every rule between two powers of two, or the quotient between two scales. */
  function chosen(block, app) {
    const caption = (text) => h("div", { class: "caption" }, text);
    if (block.scale.kind === "rule") {
      return [caption("The byte that each rule gives between two powers of two"), draw.binade(block, (rule) => app.treat({ scale_rule: rule }))];
    }
    if (block.scale.kind === "nearest") return [caption("The quotient between two scales"), draw.neighbours(Math.min(app.width, 420), block)];
    return h("p", { class: "quiet" }, "No rule applies to this block.");
  }

  /** Every element on the grid, and the selected one in full. */
  function elements(node, app) {
    const block = app.block;
    const { treatment } = block;
    const e = block.elements[app.element];
    const differ = app.differ?.codes ?? [];
    const theirs = app.found?.codes ?? [];
    const divided = treatment.arithmetic !== "real" ? "scale.arithmetic" : block.format.scale.powers ? "rounding.scaled" : "rounding.quotient";
    const clauses = [divided, `rounding.${treatment.rounding}`, "rounding.saturate", "rounding.sign", ...(treatment.prescale ? ["rounding.prescale"] : [])];
    const cells = block.elements.map((each) => h("button", {
      type: "button", class: `cell ${each.kind}${each.position === e.position ? " selected" : ""}${differ[each.position] ? " differs" : ""}${theirs[each.position] ? " theirs" : ""}`,
      tabindex: each.position === e.position ? 0 : -1, "data-element": each.position, "data-key": `cell-${each.position}`,
      "aria-label": `element ${each.position}: ${words.brief(each.P, 9)}, ${words.reason(each, block)}`,
      onclick: () => app.select(each.position), onkeydown: (event) => cellKey(event, app),
    }, h("small", {}, `${each.position} ${words.KINDS[each.kind].mark}`), h("b", {}, words.cell(each, block)), h("code", {}, block.element.bits === 4 ? words.code(each, block) : ui.hex2(each.code))));
    const used = Object.keys(words.KINDS).filter((kind) => block.elements.some((each) => each.kind === kind));
    ui.replace(node,
      ui.head(4, "Elements on the grid", `Each magnitude is divided by X${block.format.tensorScale ? " and t" : ""} and rounded to a grid point of ${block.element.name}; then it gets its sign back.`, clauses, sideOf(app)),
      block.scale.isNaN ? h("p", { class: "quiet" }, "A NaN block: nothing is rounded, and every code is 0.")
        : block.scale.X === 0 && block.elements.some((each) => Number.isNaN(each.v)) ? h("p", { class: "quiet" }, "X is 0: nothing is divided, and every code is 0 with its sign.")
        : draw.grid(app.width, block, e.position),
      h("div", { class: "columns wide-left" },
        h("div", {}, h("div", { class: "cells" }, cells),
          h("p", { class: "key" }, used.map((kind) => h("span", { class: kind }, h("b", {}, words.KINDS[kind].mark), ` ${words.KINDS[kind].text}`)),
            block.element.complement && h("span", {}, `in steps of 1/${1 / block.element.grid[1]}`),
            differ.some(Boolean) && h("span", { class: "differs" }, h("b", {}, "\u2260"), " not the code of the other treatment"),
            theirs.some(Boolean) && h("span", { class: "theirs" }, h("b", {}, "\u2260"), " not the code of your kernel"))),
        detail(e, app)));
  }

  function cellKey(event, app) {
    const across = getComputedStyle(event.currentTarget.parentElement).gridTemplateColumns.split(" ").length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    if (!step) return;
    app.select((app.element + step + app.block.k) % app.block.k);
    event.preventDefault();
  }

  /** The arithmetic of one element. */
  function detail(e, app) {
    const block = app.block;
    const { treatment, element, scale } = block;
    const t = block.format.tensorScale ? " \u00b7 t" : "";
    const divided = !Number.isNaN(e.v);
    const factor = words.fraction(element.prescale);
    const rows = [["x", `${numbers.show(e.x)}  (0x${link.hex(e.xBits)})`]];
    if (block.n) rows.push(["d, y", `${e.negative ? "-1" : "+1"}, ${numbers.show(e.y)}  (0x${link.hex(e.yBits)})`]);
    if (divided) {
      const v = block.format.scale.powers ? words.brief(e.v, 9) : words.ratio(e, 9);
      rows.push([treatment.prescale ? "v'" : "v", `${treatment.prescale ? `${factor} \u00b7 ` : ""}|${block.n ? "y" : "x"}| / ${words.divisor(block)} = ${v}`]);
      if (e.fraction !== null) {
        const [from, to] = draw.bin(e.magnitude, treatment.rounding, element);
        rows.push(["grid", e.kind === "exact" ? `${words.brief(e.lower, 9)}` : `${words.brief(e.lower, 9)} .. ${words.brief(e.upper, 9)}`]);
        if (treatment.rounding !== "sr") rows.push(["its bin", `${words.brief(from, 9)} .. ${words.brief(to, 9)}`]);
      }
    }
    if (treatment.rounding === "sr" && e.draw) rows.push(...random(e, treatment, app.state.stream));
    rows.push(["result", words.reason(e, block)], ["code", `${words.code(e, block)}, P = ${words.valueText(e, block)}`]);
    if (element.complement && e.code & element.sign) rows.push(["negative", `two's complement: ${2 * element.sign} - ${e.magnitude} = ${e.code}`]);
    if (!scale.isNaN) {
      rows.push(["value", `P \u00b7 X${t}${treatment.prescale ? ` / (${factor})` : ""} = ${words.brief(e.value, 9)}`], ["error", words.brief(e.error, 6)]);
    }
    return h("div", { class: "detail", "data-shown": e.position }, h("h3", {}, `Element ${e.position}`),
      divided && draw.interval(300, e, block),
      h("dl", {}, rows.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])),
      treatment.rounding === "sr" && h("p", { class: "clauses" }, ["random.philox", "random.counter", "random.elements"].map(ui.clause)));
  }

  /** Where the element's random integer comes from. */
  function random(e, treatment, stream) {
    const { g, j, words: drawn, r } = e.draw;
    const R = treatment.sr_bits;
    const { counter, key } = mx.callOf(stream, g);
    const place = R <= 16 ? `half ${j & 1} of word ${j >> 1}` : `word ${j}`;
    const list = drawn.map((word, i) => (i === (R <= 16 ? j >> 1 : j) ? h("b", {}, link.hex(word)) : link.hex(word)));
    return [
      ["Philox", [`call ${g}: counter ${counter.map(link.hex).join(" ")}, key ${key.map(link.hex).join(" ")}`]],
      ["words", list.flatMap((word) => [word, " "])],
      ["r", [`top ${R} bits of ${place} = `, h("b", {}, r.toString(2).padStart(R, "0")), ` = ${r}`]],
      ...(e.T === undefined ? [] : [["T", `floor(${words.brief(e.fraction, 6)} \u00b7 ${words.power(R)}) = ${e.T}`]]),
    ];
  }

  /** The stored bytes of A, and of B below them. */
  function memory(node, app) {
    const { a, b } = app.blocks;
    const packing = { 4: "packing.nibbles", 6: "packing.sixes", 8: "packing.bytes" }[a.element.bits];
    ui.replace(node,
      ui.head(5, "Bytes in memory", a.format.tensorScale ? "One scale byte, and the codes as they are stored; the tensor's scale t is stored once, beside all blocks." : "One scale byte, and the codes as they are stored.", [packing, "packing.scales"]),
      row("a", a, app), b && row("b", b, app), app.found?.theirs && kernelRow(app), b && h("p", { class: "verdict", "data-verdict": "" }, verdict(app.differ)));
  }

  function verdict(differ) {
    if (!differ) return "A and B have different formats, so their bytes are not compared.";
    const count = differ.bytes.filter(Boolean).length;
    if (!differ.scale && !count) return "A and B store the same bytes.";
    const scale = differ.scale ? "The scale bytes differ" : "The scale bytes are equal";
    return `${scale}, and ${count} of ${differ.bytes.length} code bytes differ.`;
  }

  function row(name, block, app) {
    const caption = [app.blocks.b && h("b", { class: `side ${name}` }, name.toUpperCase()), " ", h("code", {}, link.treatmentText(block.treatment))];
    return bytesRow(name, block, caption, block.scale.byte, block.packed, app.differ);
  }

  /** The bytes that the kernel wrote, below those of the treatments. */
  function kernelRow(app) {
    const { found, block } = app;
    const { scale, packed } = found.theirs;
    const caption = [h("b", { class: "side k" }, "K"), ` your kernel${app.blocks.b ? `, against ${app.side.toUpperCase()}` : ""}`];
    return bytesRow("k", block, caption, scale, packed ?? [], found);
  }

  function bytesRow(name, block, caption, scale, packed, differ) {
    const bits = block.element.bits;
    const byteCell = (byte, i) => {
      const [first, last] = [0, 7].map((bit) => Math.floor((8 * i + bit) / bits));
      const shared = first < last;
      return h("span", {
        class: `byte${differ?.bytes[i] ? " differs" : ""}`, "data-element": first, "data-also": shared ? last : null,
        title: shared ? `low bits: element ${first}, high bits: element ${last}` : `element ${first}`,
      }, ui.hex2(byte), h("small", {}, shared ? `${first},${last}` : first));
    };
    return h("div", { class: `memory ${name}` },
      h("div", { class: "caption" }, caption),
      h("div", { class: "bytes" },
        h("span", { class: `byte scale${differ?.scale ? " differs" : ""}`, "data-scale": name }, scale === null ? "-" : ui.hex2(scale), h("small", {}, "scale")),
        h("span", { class: "codes", "data-codes": name, "data-hex": Array.from(packed, ui.hex2).join("") }, Array.from(packed, byteCell))));
  }

  /** What the block lost. */
  function error(node, app) {
    const { a, b } = app.blocks;
    const sides = b ? ["a", "b"] : ["a"];
    const shown = sides.map((name) => app.blocks[name]);
    const defined = shown.some((block) => block.worst !== null);
    const worst = Math.max(...shown.flatMap((block) => block.elements.map((e) => (Number.isFinite(e.error) ? e.error : 0)))) || 1;
    const db = (value) => (value === null ? "-" : value === Infinity ? "exact" : `${value.toFixed(2)} dB`);
    const measures = [
      ["SNR", (block) => db(block.snr)], ["MSE", (block) => words.brief(block.mse, 4)],
      ["largest error", (block) => words.brief(block.worst, 4)], ["bits per element", (block) => block.bitsPerElement],
    ];
    const title = (block, i) => h("th", { scope: "col" }, b && [h("b", { class: `side ${sides[i]}` }, sides[i].toUpperCase()), " "], h("code", {}, link.treatmentText(block.treatment)));
    ui.replace(node,
      ui.head(6, "Error", "Of the values that a GEMM multiplies, against y. A prescale is undone, a transform is not.", ["dequantize.value", "gemm.prescale"]),
      h("table", {}, h("thead", {}, h("tr", {}, h("td"), shown.map(title))),
        h("tbody", {}, measures.map(([name, measure]) => h("tr", {}, h("th", { scope: "row" }, name), shown.map((block) => h("td", {}, measure(block))))))),
      h("div", { class: "caption" }, defined ? `|value - y| of each element, up to ${words.brief(worst, 3)}` : "A NaN block has no error."),
      defined && h("div", { class: "errors" }, errorBars(app.block, shown, (e, j) =>
        h("i", { class: sides[j], style: `height:${(100 * (e?.error || 0)) / worst}%` }))));
  }

  /** A place for each number that a shown block holds; blocks of two lengths have some of them in common. */
  function errorBars(pointed, shown, bar) {
    const start = Math.min(...shown.map((block) => block.first));
    const end = Math.max(...shown.map((block) => block.first + block.k));
    return Array.from({ length: end - start }, (_, i) => {
      const element = start + i - pointed.first;
      return h("span", { "data-element": element >= 0 && element < pointed.k ? element : null },
        shown.map((block, j) => bar(block.elements[start + i - block.first], j)));
    });
  }

  return { transform, scale, elements, memory, error };
})();
