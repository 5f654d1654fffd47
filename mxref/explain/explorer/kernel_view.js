// The bytes of a kernel on the page: two boxes, dropped files, and the first step that differs.
"use strict";

const kernelView = (() => {
  const { h } = ui;
  const STEPS = { scale: [3, "the scale byte"], elements: [4, "elements on the grid"], memory: [5, "bytes in memory"] };
  const PLACE = { hadamard: [2, "transform", "signs and Hadamard"] };

  /** The bytes of the shown block: both null if nothing was given. An error says what does not fit. */
  function ofBlock(app) {
    const { kernel: given, state, block } = app;
    const count = link.blockCount(state);
    const size = block.packed.length;
    const index = block.first / block.k;
    const part = (bytes, each, what) => {
      if (!bytes.length) return null;
      if (bytes.length === each && (count === 1 || given.index === index)) return bytes;
      if (bytes.length === each) throw new kernel.KernelError(`These are the bytes of block ${given.index}; block ${index} is shown.`);
      if (bytes.length === each * count) return bytes.subarray(index * each, (index + 1) * each);
      const row = count > 1 ? `, and these ${count} blocks have ${each * count}` : "";
      throw new kernel.KernelError(`${bytes.length} bytes of ${what}: a block of ${block.format.title} has ${each}${row}.`);
    };
    const scale = part(given.scales, 1, "scales");
    return { scale: scale && scale[0], packed: part(given.codes, size, "codes") };
  }

  /** What the kernel's bytes of the shown block differ in; null without any. The page asks at each change. */
  function found(app) {
    try {
      const theirs = ofBlock(app);
      if (theirs.scale === null && !theirs.packed) return null;
      return { ...kernel.difference(app.block, theirs, app.state), theirs, problem: null };
    } catch (error) {
      if (!(error instanceof kernel.KernelError)) throw error;
      return { problem: error.message, step: null, theirs: null };
    }
  }

  /** Build the section once; the function that it returns shows the state again. */
  function build(node, app) {
    let notation = "hex";
    let array = null; // numbers of a file, with the bytes of other files that belong to them
    let files = {};
    const box = (key, label, rows) => h("textarea", { rows, spellcheck: "false", "data-key": key, "aria-label": label, oninput: pasted });
    const scales = box("kernel-scales", "scale bytes of the kernel", 1);
    const codes = box("kernel-codes", "code bytes of the kernel", 3);
    const problem = h("p", { class: "wrong", role: "status" });
    const verdict = h("div", { class: "kernel-verdict", "data-kernel": "", "aria-live": "polite" });
    const held = h("p", { class: "quiet" });
    const picker = h("input", { type: "file", accept: ".npy", multiple: true, class: "unseen", id: "npy", onchange: () => take([...picker.files]) });

    function pasted() {
      array = null;
      files = {};
      read();
    }

    function read() {
      try {
        app.kernel = {
          scales: kernel.parseBytes(scales.value, notation), codes: kernel.parseBytes(codes.value, notation), index: app.block.first / app.block.k,
        };
        problem.textContent = "";
      } catch (error) {
        app.kernel = { scales: new Uint8Array(), codes: new Uint8Array(), index: 0 };
        problem.textContent = error.message;
      }
      app.update();
    }

    function write(given) {
      const text = (bytes) => Array.from(bytes ?? [], notation === "hex" ? ui.hex2 : String).join(" ");
      scales.value = text(given.scales);
      codes.value = text(given.codes);
      problem.textContent = "";
      app.kernel = { scales: given.scales ?? new Uint8Array(), codes: given.codes ?? new Uint8Array(), index: given.index };
    }

    /** Read files: numbers first, then bytes, which are codes or scales by their number. */
    async function take(list) {
      try {
        const read_ = await Promise.all(list.map(async (file) => kernel.readNpy(await file.arrayBuffer(), file.name)));
        const numbersFile = read_.find((each) => each.words);
        if (numbersFile) {
          const length = numbersFile.shape.at(-1) ?? 1;
          array = { ...numbersFile, length, rows: numbersFile.words.length / length };
          files = {};
        }
        for (const each of read_.filter((one) => one.bytes)) files[partOf(each)] = each;
        if (array) compareArray(0);
        else {
          write({ scales: files.scales?.bytes, codes: files.codes?.bytes, index: app.block.first / app.block.k });
          app.update();
        }
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    /** Whether a file holds codes or scales: a block has one scale byte, and several bytes of codes. */
    function partOf({ bytes, name }) {
      const { block, state } = app;
      const blocks = array ? array.words.length / block.k : link.blockCount(state);
      if (bytes.length === blocks * block.packed.length || (!array && bytes.length === block.packed.length)) return "codes";
      if (bytes.length === blocks || (!array && bytes.length === 1)) return "scales";
      throw new kernel.KernelError(`${name} has ${bytes.length} bytes; ${blocks} blocks of ${block.format.title} have ${blocks} bytes of scales and ${blocks * block.packed.length} of codes. Scales in tiles are first converted with mxref layout.`);
    }

    let compared = null;
    let comparedKey = null;

    /** What differs in the whole array, computed anew only for another treatment. */
    function wrong() {
      const treatment = app.state[app.side];
      const key = [array, files.codes, files.scales, app.state.stream, link.treatmentText(treatment)];
      if (!comparedKey || key.some((each, i) => each !== comparedKey[i])) {
        compared = kernel.wrongBlocks(array, files.codes?.bytes, files.scales?.bytes, treatment, app.state.stream, null);
        comparedKey = key;
      }
      return compared;
    }

    /** Show a differing block of the array: the first from block `from` on, or the first of all. */
    function compareArray(from) {
      const { block } = app;
      const { wrong: list, A } = wrong();
      const b = list.find((each) => each >= from) ?? list[0] ?? 0;
      const unit = Math.max(block.k, block.n);
      const first = Math.floor((b * block.k) / unit) * unit;
      const words = Array.from(array.words.subarray(first, Math.min(first + unit, array.words.length)));
      const size = block.packed.length;
      write({
        scales: files.scales?.bytes.subarray(b, b + 1), codes: files.codes?.bytes.subarray(b * size, (b + 1) * size), index: (b * block.k - first) / block.k,
      });
      array.at = b;
      app.change({ words, block: (b * block.k - first) / block.k, at: BigInt(first), amax: A, element: 0 });
    }

    function whole() {
      if (!array) return null;
      const { rows, length, name } = array;
      const title = `${name} [${array.shape.join(", ")}]`;
      const missing = ["codes", "scales"].filter((part) => !files[part]);
      if (missing.length === 2) return `${title}: now drop the files of its codes and scales.`;
      const { wrong: list, count } = wrong();
      const only = missing.length ? ` Only the ${missing[0] === "codes" ? "scales" : "codes"} are compared.` : "";
      if (!list.length) return `${title}: all ${count} blocks are equal.${only}`;
      const across = length / app.block.k;
      const at = rows > 1 ? `block ${array.at % across} of row ${Math.floor(array.at / across)}` : `block ${array.at}`;
      return [`${title}: ${list.length} of ${count} blocks differ.${only} Shown is ${at}. `,
        list.length > 1 && h("button", { type: "button", class: "plain", "data-key": "kernel-next", onclick: () => compareArray(array.at + 1) }, "Next that differs")];
    }

    function example() {
      const other = { ...app.state[app.side], rounding: app.state[app.side].rounding === "rtz" ? "rne" : "rtz" };
      const made = explain.block(app.state, other);
      array = null;
      files = {};
      write({ scales: Uint8Array.of(made.scale.byte), codes: made.packed, index: made.first / made.k });
      app.update();
    }

    node.replaceChildren(
      h("div", { class: "head" },
        h("h2", {}, h("span", { class: "step" }, "="), "Your kernel's bytes"),
        h("p", { class: "quiet" }, "Paste what your kernel wrote for these numbers, and see the first step that differs. Or drop x.npy, codes.npy and scales.npy anywhere on the page."),
        h("p", { class: "clauses" }, ["packing.nibbles", "packing.scales"].map(ui.clause))),
      h("div", { class: "kernel-boxes" },
        h("label", {}, h("span", { class: "caption" }, "Scale byte"), scales), h("label", {}, h("span", { class: "caption" }, "Code bytes, as they are stored"), codes)),
      h("div", { class: "toolbar" },
        h("span", { class: "segments" }, ["hex", "decimal"].map((value) => h("label", {},
          h("input", { type: "radio", name: "kernel-notation", value, checked: value === notation, onchange: () => { notation = value; if (array || files.codes || files.scales) { write(app.kernel); app.update(); } else read(); } }), h("span", {}, value)))),
        h("span", { class: "group" }, picker, h("label", { class: "plain button", for: "npy" }, "Open .npy files"),
          h("button", { type: "button", class: "plain", "data-key": "kernel-example", onclick: example }, "Example"))),
      problem, held, verdict);

    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      const list = [...event.dataTransfer.files];
      if (list.length) take(list);
    });

    return () => {
      const result = app.found;
      try {
        ui.replace(held, whole());
      } catch (error) {
        if (!(error instanceof kernel.KernelError)) throw error;
        held.textContent = error.message;
      }
      ui.replace(verdict, result === null ? null : result.problem ? h("p", { class: "wrong" }, result.problem) : lines(app, result));
    };
  }

  /** What the comparison says, in sentences. */
  function lines(app, result) {
    const { block, state } = app;
    const { theirs, step } = result;
    const side = state.b ? app.side.toUpperCase() : "this treatment";
    const what = [theirs.scale !== null && "the scale byte", theirs.packed && `${theirs.packed.length} code bytes`].filter(Boolean).join(" and ");
    if (!step) return h("p", { class: "verdict same" }, `Equal to ${side}: ${what}.`);
    const ways = kernel.explanations(state, state[app.side], theirs);
    const turned = ways.length && ways.every(([key]) => key === "hadamard");
    const [number, id, title] = turned ? PLACE.hadamard : [STEPS[step][0], step, STEPS[step][1]];
    const wrongCodes = result.codes.filter(Boolean).length;
    const first = result.codes.indexOf(true);
    const digits = (code) => (block.element.bits === 4 ? code.toString(2).padStart(4, "0") : ui.hex2(code));
    const named = (code) => `${digits(code)} (${words.brief(block.element.values[code], 9)})`;
    const sentences = [];
    if (step === "scale") {
      const value = block.format.scale.values[theirs.scale];
      sentences.push(`Yours is ${ui.hex2(theirs.scale)}${Number.isNaN(value) ? ", which is NaN" : `, the scale ${words.brief(value, 9)}`}; ${side} has ${ui.hex2(block.scale.byte)}.`);
      if (result.under !== null) sentences.push(result.under ? `Under your scale byte ${result.under} of ${block.k} codes differ too.` : "Under your scale byte all codes are right.");
    } else if (step === "memory") {
      sentences.push(`All codes are right, in another order: the layout ${result.order}. mxref layout ${result.order} mxref converts it.`);
    } else {
      sentences.push(`The scale byte is ${theirs.scale === null ? "not given" : "equal"}, and ${wrongCodes} of ${block.k} codes differ. Element ${first}: yours is ${named(result.own[first])}, ${side} has ${named(block.codes[first])}.`);
    }
    const go = () => {
      if (first >= 0 && step === "elements") app.select(first);
      document.getElementById(id).scrollIntoView({ block: "start" });
    };
    return [
      h("p", { class: "verdict" }, "The first step that differs: ", h("button", { type: "button", class: "plain", "data-key": "kernel-step", "data-step": number, onclick: go }, `${number}, ${title}`)),
      sentences.map((sentence) => h("p", {}, sentence)),
      ways.length > 0 && h("p", {}, "All bytes of this block are those of ", ways.slice(0, 6).map(([key, value, treatment], i) => [i ? ", " : "",
        h("button", { type: "button", class: "plain", "data-way": `${key}=${value}`, onclick: () => app.compare(treatment) }, key === "dialect" ? value : `${key} = ${value}`)]), ways.length > 6 ? ", ..." : "", ". Choose one to see it as B."),
    ];
  }

  return { build, found };
})();
