// The page: its state, what every change leads to, and the address that holds it.
"use strict";

(() => {
  const byId = (id) => document.getElementById(id);
  const FIRST = { words: numbers.PRESETS.normal(), a: "ocp", b: "amd" };
  const WAIT = 200; // milliseconds before a change goes into the address: browsers refuse many changes at once

  const app = {
    state: null,
    side: "a",
    width: 0, // of a step's content: asking for it at every change would lay the page out twice
    blocks: {},
    differ: null,
    kernel: { scales: new Uint8Array(), codes: new Uint8Array(), index: 0 }, // bytes of the reader's kernel
    found: null, // what they differ in
    get block() { return this.blocks[this.side]; },
    /** The element that is shown in full: the state's, or the last of a shorter block. */
    get element() { return Math.min(this.state.element, this.block.k - 1); },
    change(changes) {
      byId("problem").hidden = true;
      const lengthOf = (state) => mx.FORMATS[state.a.format].k;
      const first = this.state.block * lengthOf(this.state);
      const given = "block" in changes;
      this.state = { ...this.state, ...changes };
      if (!given) this.state.block = Math.floor(first / lengthOf(this.state));
      if (this.state.block >= link.blockCount(this.state)) this.state.block = 0;
      if (!link.hasAmax(this.state)) this.state.amax = null;
      this.update();
    },
    treat(changes) { this.change({ [this.side]: { ...this.state[this.side], ...changes } }); },
    compare(treatment) {
      this.side = treatment ? "b" : "a";
      this.change({ b: treatment });
    },
    show(side) {
      this.side = side;
      this.update();
    },
    select(element) { this.change({ element }); },
    update,
    say(text) { byId("said").textContent = text; },
  };

  function readAddress() {
    const problem = byId("problem");
    problem.hidden = true;
    try {
      app.state = link.read(location.hash);
      if (location.hash.length < 2) {
        Object.assign(app.state, { words: FIRST.words, a: link.readTreatment(FIRST.a), b: link.readTreatment(FIRST.b) });
      }
    } catch (error) {
      problem.textContent = `This address is not one of the explorer: ${error.message}. A first example is shown instead.`;
      problem.hidden = false;
      app.state ??= { ...link.read(""), words: FIRST.words };
    }
    if (!app.state.b) app.side = "a";
  }

  function measure() {
    const node = byId("elements");
    app.width = Math.max(node.clientWidth - 2 * parseFloat(getComputedStyle(node).paddingLeft), 240);
  }

  const draws = [];
  let pending = 0;
  let written = "";

  function update() {
    const { state } = app;
    app.blocks = { a: explain.block(state, state.a), b: state.b ? explain.block(state, state.b) : null };
    app.differ = explain.differences(app.blocks.a, app.blocks.b);
    app.found = kernelView.found(app);
    for (const each of draws) each();
    byId("panel-summary").textContent = [state.a, state.b].filter(Boolean).map(link.treatmentText).join(" / ");
    window.clearTimeout(pending);
    pending = window.setTimeout(writeAddress, WAIT);
  }

  function writeAddress() {
    written = link.write(app.state);
    if (byId("problem").hidden) history.replaceState(null, "", written);
  }

  // ---- pointing at an element, wherever it is drawn ----

  function point(element, target) {
    for (const node of document.querySelectorAll(".pointed")) node.classList.remove("pointed");
    const tip = byId("tip");
    tip.hidden = element === null;
    if (element === null) return;
    for (const node of document.querySelectorAll(`[data-element="${element}"], [data-also="${element}"]`)) node.classList.add("pointed");
    tip.textContent = words.short(app.block.elements[element], app.block);
    const box = target.getBoundingClientRect();
    const left = Math.min(Math.max(box.left + box.width / 2 - tip.offsetWidth / 2, 8), document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
  }

  function pointing(event) {
    const target = event.target.closest?.("[data-element]");
    point(target ? Number(target.dataset.element) : null, target);
  }

  // ---- start ----

  async function copy() {
    window.clearTimeout(pending);
    writeAddress();
    const address = location.href.split("#")[0] + written;
    try {
      await navigator.clipboard.writeText(address);
      byId("copy").textContent = "Copied";
    } catch {
      window.prompt("Copy the address:", address);
    }
    window.setTimeout(() => { byId("copy").textContent = "Copy link"; }, 1500);
  }

  function start() {
    byId("docs-link").hidden = !ui.hasDocs;
    if (window.matchMedia("(max-width: 899px)").matches) byId("panel").open = false;
    readAddress();
    measure();
    const shownInput = input.build(byId("numbers"), app);
    const shownKernel = kernelView.build(byId("kernel"), app);
    const shownPicture = picture.build(byId("picture"), app);
    const chosen = () => [app.side, app.state.a, app.state.b, app.state.stream, app.state.at, app.state.others, app.state.amax];
    draws.push(ui.onlyChanged(chosen, () => controls.render(byId("treatment"), app)), shownInput, shownKernel);
    for (const name of ["transform", "scale", "elements", "memory", "error"]) draws.push(() => steps[name](byId(name), app));
    draws.push(shownPicture);
    update();
    byId("treatment").addEventListener("submit", (event) => event.preventDefault());
    byId("copy").addEventListener("click", copy);
    document.addEventListener("pointerover", pointing);
    document.addEventListener("focusin", pointing);
    document.addEventListener("scroll", () => point(null), { passive: true });
    document.addEventListener("keydown", (event) => event.key === "Escape" && point(null));
    document.addEventListener("click", (event) => {
      const target = event.target.closest("[data-element]");
      if (target && !target.closest(".bars.live, .cells")) app.select(Number(target.dataset.element));
    });
    window.addEventListener("hashchange", () => {
      if (location.hash === written) return;
      readAddress();
      update();
    });
    let wide = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth === wide) return; // a phone's address bar changes the height alone
      wide = window.innerWidth;
      measure();
      update();
    });
    document.documentElement.dataset.ready = "";
    performance.mark("ready");
  }

  start();
})();
