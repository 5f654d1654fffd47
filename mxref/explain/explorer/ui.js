// Elements of the page: making them, linking clauses, pointing at an element of the block.
"use strict";

const ui = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  /** An HTML element; attributes whose names begin with "on" are listeners. */
  const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

  /** An SVG element. */
  const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  const CHAPTERS = { dequantize: "quantize", dialect: "recipe" };

  /** Whether the documentation is beside the page: it has a copy, and the package has the page alone. */
  const hasDocs = !location.pathname.includes("/mxref/explain/explorer/");

  /** The ID of a clause, linked to its text in the documentation. */
  function clause(id) {
    if (!hasDocs) return h("span", { class: "clause" }, id);
    const prefix = id.split(".")[0];
    const href = `../spec/${CHAPTERS[prefix] || prefix}.html#${id}`;
    return h("a", { class: "clause", href, title: `the clause ${id}` }, id);
  }

  /** The head of a step. */
  function head(number, title, sentence, clauses, side) {
    return h("div", { class: "head" },
      h("h2", {}, h("span", { class: "step" }, number), title, side && h("span", { class: `side ${side.name}` }, side.text)),
      h("p", { class: "quiet" }, sentence),
      h("p", { class: "clauses" }, clauses.map(clause)));
  }

  /** Rebuild the content of a node, and give the focus back to the part of it that had it. */
  function replace(node, ...children) {
    const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    node.replaceChildren(...children.flat(Infinity).filter(Boolean));
    if (key) node.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true });
  }

  /** A function that draws only if one of its inputs is another than the last time. */
  function onlyChanged(inputs, draw) {
    let last = [];
    return () => {
      const now = inputs();
      if (now.length === last.length && now.every((each, i) => each === last[i])) return;
      last = now;
      draw();
    };
  }

  const hex2 = (byte) => byte.toString(16).padStart(2, "0");

  /** A choice among a few: radio buttons that look like one row of buttons. */
  function choice(name, legend, values, current, onChoose, clauses = [], labels = {}) {
    return h("fieldset", { class: "choice", "data-name": name },
      h("legend", {}, legend, clauses.map(clause)),
      h("div", { class: "segments" }, values.map((value) => h("label", {},
        h("input", {
          type: "radio", name, value: String(value), checked: String(value) === String(current), "data-key": `${name}-${value}`,
          onchange: () => onChoose(value),
        }),
        h("span", {}, labels[value] ?? value)))));
  }

  return { h, s, hasDocs, clause, head, replace, onlyChanged, hex2, choice };
})();
