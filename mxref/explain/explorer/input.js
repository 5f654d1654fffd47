// The first step: the numbers of a block as bars, one of them as text, all of them as text, presets and generators.
"use strict";

const input = (() => {
  const { h } = ui;
  const PRESET_TITLES = { normal: "normal", ties: "ties", tiny: "tiny", nan: "NaN", outlier: "outlier", turn: "near a flip" };

  /** Build the step once; the function that it returns shows the state again. */
  function build(node, app) {
    const plot = bars.plot("the numbers of the block; arrow keys choose and change", (i, word) => change(i, word), (i) => app.select(i));
    const status = h("p", { class: "status" });
    const blocks = h("div", { class: "segments" });
    const decimal = field("decimal", "Decimal", (text) => numbers.parseOne(text));
    const bits = field("bits", "Bits", (text) => numbers.parseOne(text.startsWith("0x") ? text : `0x${text}`));
    const name = h("b", {}, "");
    const area = h("textarea", { rows: 3, spellcheck: "false", "aria-label": "all numbers as text", oninput: () => paste() });
    const problem = h("p", { class: "wrong", role: "status" });
    let notation = "decimal";
    let drawNumber = 1;

    function change(i, word) {
      if (i < 0) return app.update();
      const at = app.block.first + i;
      const changed = Array.from({ length: Math.max(app.state.words.length, at + 1) }, (_, k) => app.state.words[k] ?? 0);
      changed[at] = word;
      return app.change({ words: changed, element: i });
    }

    function field(key, label, parse) {
      const box = h("input", {
        type: "text", spellcheck: "false", "data-key": key, onchange: () => {
          try {
            change(app.element, parse(box.value.trim()));
            box.removeAttribute("aria-invalid");
            problem.textContent = "";
          } catch (error) {
            box.setAttribute("aria-invalid", "true");
            problem.textContent = error.message;
          }
        },
      });
      return { box, node: h("label", { class: "inline" }, h("span", {}, label), box) };
    }

    function paste() {
      try {
        app.change({ words: numbers.parse(area.value), block: 0, element: 0 });
        problem.textContent = "";
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    const load = (made, amax = null) => app.change({ words: made, block: 0, amax });
    const preset = (key) => load(numbers.PRESETS[key](), key === "ties" && app.block.format.tensorScale ? numbers.TIES_AMAX : null);
    const selectedWord = () => app.state.words[app.block.first + app.element] ?? 0;
    const nudge = (text, label, make) => h("button", { type: "button", class: "plain", title: label, "aria-label": label, onclick: () => change(app.element, make(selectedWord())) }, text);

    node.replaceChildren(
      ui.head(1, "The numbers of a block", "Drag a bar and watch the scale flip. By touch, tap a bar first.", ["conventions.inputs"]),
      h("div", { class: "toolbar" },
        h("span", { class: "group" }, h("span", { class: "quiet" }, "Presets"),
          Object.keys(numbers.PRESETS).map((key) => h("button", { type: "button", class: "plain", "data-preset": key, onclick: () => preset(key) }, PRESET_TITLES[key]))),
        h("span", { class: "group" }, h("span", { class: "quiet" }, "Draw"),
          numbers.GENERATORS.map((generator) => h("button", {
            type: "button", class: "plain", "data-generator": generator,
            onclick: () => load(numbers.generate(generator, drawNumber++)),
          }, generator === "laplace" ? "Laplace" : generator)))),
      plot.node,
      h("p", { class: "keys" }, "Keys: \u2190 \u2192 choose, \u2191 \u2193 change, with Shift by one float32, \u2212 flips the sign."),
      status, blocks,
      h("div", { class: "editor" }, name, decimal.node, bits.node,
        nudge("\u2212 ulp", "the next float32 below", (word) => bars.neighbour(word, -1)),
        nudge("+ ulp", "the next float32 above", (word) => bars.neighbour(word, 1)),
        nudge("\u00b1", "flip the sign", (word) => (word ^ 0x80000000) >>> 0)),
      h("details", { class: "paste", open: true }, h("summary", {}, "Type or paste all numbers"),
        h("div", { class: "segments" }, ["decimal", "hex"].map((value) => h("label", {},
          h("input", { type: "radio", name: "notation", value, checked: value === notation, onchange: () => { notation = value; text(); } }), h("span", {}, value)))),
        area),
      problem);

    function text() {
      if (document.activeElement === area) return;
      area.value = app.state.words.map((word) => (notation === "hex" ? `0x${link.hex(word)}` : numbers.show(mx.valueOf(word)))).join(" ");
    }

    let last = null;
    return () => {
      const { state, block } = app;
      plot.draw(block.elements.map((e) => e.xBits), app.element, block.n ? [] : bars.flips(block));
      const byte = ui.hex2(block.scale.byte);
      status.replaceChildren(
        `${block.n ? "amax after the transform" : "amax"} ${numbers.show(block.scale.amax)} \u2192 scale byte `,
        h("b", { class: last !== null && last !== byte ? "flipped" : "", "data-status": byte }, byte), ` (X = ${words.scaleText(block)})`);
      last = byte;
      name.textContent = `Element ${app.element}`;
      for (const [{ box }, value] of [[decimal, numbers.show(mx.valueOf(selectedWord()))], [bits, `0x${link.hex(selectedWord())}`]]) {
        if (document.activeElement !== box) box.value = value;
      }
      const count = link.blockCount(state);
      ui.replace(blocks, count > 1 && [h("span", { class: "quiet" }, "Block"), Array.from({ length: count }, (_, i) => h("button", {
        type: "button", class: "segment", "aria-pressed": String(i === state.block), "data-key": `block-${i}`, onclick: () => app.change({ block: i }),
      }, i))]);
      text();
    };
  }

  return { build };
})();
