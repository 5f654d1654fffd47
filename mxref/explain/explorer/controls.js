// Every choice of a recipe, for the treatments A and B, and the random stream that they share.
"use strict";

const controls = (() => {
  const { h } = ui;
  const FORMAT_TITLES = Object.fromEntries(Object.entries(mx.FORMATS).map(([name, format]) => [name, format.title]));
  const POLICY_TITLES = { none: "none", fixed: "fixed", per_step: "per step", per_step_layer: "per step, layer" };

  /**
   * Draw the panel. `app` has the state, the side that is shown, and the ways to change them:
   * `treat(changes)`, `change(changes)`, `show(side)`, `compare(treatment or null)`.
   */
  function render(form, app) {
    const { state, side } = app;
    const treatment = state[side];
    ui.replace(form, sides(app), dialects(app, treatment), fields(app, treatment), stream(app));
  }

  function sides(app) {
    const { state, side } = app;
    const tab = (name) => h("button", {
      type: "button", class: `tab ${name}`, "aria-pressed": String(side === name), "data-key": `side-${name}`,
      onclick: () => app.show(name),
    }, h("b", {}, name.toUpperCase()), " ", h("code", {}, link.treatmentText(state[name])));
    const other = link.treatmentText(state.a) === "amd" ? "ocp" : "amd";
    return h("div", { class: "sides" }, tab("a"),
      state.b
        ? [tab("b"), h("button", { type: "button", class: "plain", "data-key": "side-none", onclick: () => app.compare(null) }, "Stop comparing")]
        : h("button", { type: "button", class: "plain", "data-key": "side-none", onclick: () => app.compare(link.readTreatment(other)) }, "Compare with another"));
  }

  function dialects(app, treatment) {
    const text = link.treatmentText(treatment);
    return h("fieldset", {},
      h("legend", {}, "Dialect", ui.clause(`dialect.${text.split(",")[0]}`)),
      h("div", { class: "segments" }, Object.keys(mx.DIALECTS).map((name) => h("button", {
        type: "button", class: "segment", "aria-pressed": String(text === name), "data-key": `dialect-${name}`,
        disabled: !link.takes(treatment.format, name), title: link.takes(treatment.format, name) ? null : lacks(treatment),
        onclick: () => app.treat(link.inDialect(name, treatment.format)),
      }, name))));
  }

  /** Why choices that are made for powers of two are not offered. */
  const lacks = ({ format }) => `not for ${mx.FORMATS[format].title}: its scales, ${mx.FORMATS[format].scale.name}, have a mantissa`;

  function fields(app, treatment) {
    const { format } = treatment;
    const { element, scale, clause, tensorScale } = mx.FORMATS[format];
    const choose = (key) => (value) => app.treat({ [key]: value });
    return [
      ui.choice("format", "Format", Object.keys(mx.FORMATS), format, (to) => app.treat(link.inFormat(treatment, to)), [clause], FORMAT_TITLES),
      tensorScale && amax(app),
      ui.choice("scale_rule", "Scale rule", words.rules(treatment), treatment.scale_rule, choose("scale_rule"), [`scale.rule.${words.ruleKind(treatment.scale_rule)}`], words.NAMES),
      ui.choice("rounding", "Rounding", mx.ROUNDINGS, treatment.rounding, choose("rounding"), [`rounding.${treatment.rounding}`], words.NAMES),
      treatment.rounding === "sr" && bits(app, treatment),
      ui.choice("hadamard", "Hadamard", [0, ...mx.SIZES], treatment.hadamard, (n) => app.treat(rotated(n, treatment)), ["hadamard.size"], { 0: "none" }),
      treatment.hadamard > 0 && [
        ui.choice("signs", "Random signs", mx.POLICIES, treatment.signs, (signs) => app.treat({ signs, sign_vector: "" }), ["hadamard.policy"], POLICY_TITLES),
        treatment.signs === "none" && given(app, treatment),
      ],
      scale.powers
        ? ui.choice("prescale", "Prescale", [false, true], treatment.prescale, choose("prescale"), ["rounding.prescale"],
          { false: "none", true: words.fraction(element.prescale) })
        : h("fieldset", {}, h("legend", {}, "Prescale", ui.clause("rounding.prescale")), h("p", { class: "quiet" }, `${lacks(treatment)}.`)),
      !scale.powers && ui.choice("arithmetic", "Arithmetic", mx.arithmeticsOf(format), treatment.arithmetic, (arithmetic) => app.treat({ arithmetic, zero_scale: 0, four_over_six: "off" }), ["scale.arithmetic"], words.ARITHMETICS),
      !scale.powers && treatment.arithmetic === "real" && mx.rowsOf(treatment) === 1 && ui.choice("four_over_six", "Four over six, by the error", mx.choicesOf(format), treatment.four_over_six, choose("four_over_six"), ["scale.four_over_six"]),
      ui.choice("zero_scale", "Byte of a zero block", treatment.arithmetic === "real" ? mx.zeroScalesOf(format) : [0], treatment.zero_scale, choose("zero_scale"), ["scale.zero"]),
      ui.choice("block", "Scale shared by", blocks(treatment), treatment.block, (block) => app.treat({ block, four_over_six: "off" }), [mx.rowsOf(treatment) > 1 ? "scale.block.tile" : "scale.block.row"]),
      mx.rowsOf(treatment) > 1 && others(app),
    ];
  }

  /** The shapes that the page offers: a block, a square tile, and one that the address gives. */
  const blocks = ({ format, block }) => [...new Set([...mx.blocksOf(format), block])];

  /** The changes that a Hadamard size brings: signs that fit it. */
  function rotated(n, treatment) {
    return { hadamard: n, signs: n ? treatment.signs : "none", sign_vector: "" };
  }

  function bits(app, treatment) {
    return h("label", { class: "field" }, h("span", {}, "Random bits R", ui.clause("random.elements")),
      h("span", { class: "range" },
        h("input", {
          type: "range", min: 1, max: mx.maxBitsOf(treatment.format), value: treatment.sr_bits, "data-key": "sr_bits",
          oninput: (event) => app.treat({ sr_bits: Number(event.target.value) }),
        }), h("output", {}, treatment.sr_bits)));
  }

  /** A text field whose value is read by `parse`; what it refuses is shown at the field. */
  function entry(key, label, value, parse, apply, clauses = [], placeholder = null) {
    const problem = h("small", { class: "wrong", hidden: true });
    const input = h("input", {
      type: "text", value, placeholder, spellcheck: "false", "data-key": key,
      onchange: (event) => {
        try {
          apply(parse(event.target.value.trim()));
        } catch (error) {
          problem.textContent = error.message;
          problem.hidden = false;
          input.setAttribute("aria-invalid", "true");
        }
      },
    });
    return h("label", { class: "field" }, h("span", {}, label, clauses.map(ui.clause)), input, problem);
  }

  function given(app, treatment) {
    return entry("sign_vector", "Given signs, as +-+-", treatment.sign_vector, (text) => {
      link.checkTreatment({ ...treatment, sign_vector: text });
      if (!/^[+-]*$/.test(text)) throw new Error("made of + and - only");
      return text;
    }, (sign_vector) => app.treat({ sign_vector }), ["hadamard.vector"]);
  }

  function others(app) {
    return entry("others", "Largest magnitude in the tile's other rows", numbers.show(mx.valueOf(app.state.others)),
      (text) => (numbers.parseOne(text) & 0x7fffffff) >>> 0, (value) => app.change({ others: value }));
  }

  /** A, the largest magnitude of the tensor; nothing is that of the numbers themselves. */
  function amax(app) {
    const { amax: word } = app.state;
    return entry("amax", "Largest magnitude A of the tensor", word === null ? "" : numbers.show(mx.valueOf(word)),
      (text) => (text ? link.checkAmax(numbers.parseOne(text)) : null), (value) => app.change({ amax: value }),
      ["scale.tensor.amax"], "that of the numbers");
  }

  /** The stream, where a treatment draws from it. */
  function stream(app) {
    const { state } = app;
    const drawn = [state.a, state.b].some((t) => t && (t.rounding === "sr" || t.signs !== "none"));
    if (!drawn) return null;
    const number = (key, label, last) => entry(key, label, String(state.stream[key]),
      (text) => link.integer(key, text, last), (value) => app.change({ stream: { ...state.stream, [key]: value } }));
    return h("fieldset", { class: "stream" }, h("legend", {}, "Random stream", ui.clause("random.stream")),
      number("seed", "Seed", 0xffffffffffffffffn), number("step", "Step", 0xffffffff), number("layer", "Layer", 0xffffff),
      h("label", { class: "field" }, h("span", {}, "Operand"), h("select", {
        "data-key": "operand", onchange: (event) => app.change({ stream: { ...state.stream, operand: event.target.selectedIndex } }),
      }, link.OPERANDS.map((name, i) => h("option", { selected: i === state.stream.operand }, name)))),
      entry("at", "Index of the first number in its tensor", String(state.at),
        (text) => link.integer("at", text, 0xffffffffffffffffn), (at) => app.change({ at }), ["random.index"]));
  }

  return { render };
})();
