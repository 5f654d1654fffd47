// The numbers of a block as bars that can be dragged, or changed by the keyboard.
"use strict";

const bars = (() => {
  const { h } = ui;

  /** The largest finite magnitude of words; 0 if there is none. */
  function largest(words) {
    const finite = words.map((word) => (word & 0x7fffffff) >>> 0).filter((word) => word < mx.INFINITY_BITS);
    return mx.valueOf(Math.max(0, ...finite));
  }

  /** The end of the axis: above the power of two that follows the largest magnitude, so that a scale can flip. */
  function axisTop(words) {
    const amax = largest(words);
    if (amax === 0) return 1;
    const E = Math.max(mx.bitsOf(amax) >>> 23, 1);
    return 1.25 * mx.exp2(E - 126);
  }

  /**
   * A plot of the numbers of a block. `onChange(i, word)` is called for each new value; without it nothing can be changed.
   * `draw(words, selected, flips)` shows other words; flips are magnitudes at which the scale changes.
   */
  function plot(label, onChange, onSelect) {
    const zero = h("div", { class: "zero" });
    const lines = h("div", { class: "flips" });
    const node = h("div", { class: `bars${onChange ? " live" : ""}`, role: "group", "aria-label": label }, lines, zero);
    let columns = [];
    let words = [];
    let top = 1;
    let dragged = null;

    function column(i) {
      const bar = h("i", { class: "bar" });
      const attributes = onChange
        ? { role: "slider", tabindex: i === 0 ? 0 : -1, "aria-label": `element ${i}`, "aria-orientation": "vertical" } : {};
      return { bar, node: h("div", { class: "column", "data-element": i, ...attributes }, bar) };
    }

    function show(i) {
      const { bar, node: cell } = columns[i];
      const value = mx.valueOf(words[i]);
      const special = !Number.isFinite(value);
      const share = special ? 1 : Math.min(Math.abs(value) / top, 1);
      const negative = words[i] >>> 31 === 1;
      bar.className = `bar${negative ? " negative" : ""}${special ? " special" : ""}`;
      bar.style.height = `${Math.max(share * 50, value === 0 ? 0 : 0.4)}%`;
      bar.style[negative ? "top" : "bottom"] = "50%";
      bar.style[negative ? "bottom" : "top"] = "auto";
      if (onChange) {
        cell.setAttribute("aria-valuenow", special ? 0 : value);
        cell.setAttribute("aria-valuemin", -3.4028234663852886e38);
        cell.setAttribute("aria-valuemax", 3.4028234663852886e38);
        cell.setAttribute("aria-valuetext", numbers.show(value));
      }
    }

    function draw(newWords, selected, flips) {
      words = newWords;
      if (columns.length !== words.length) {
        columns = words.map((_, i) => column(i));
        node.replaceChildren(lines, zero, ...columns.map((c) => c.node));
      }
      if (dragged === null) top = axisTop(words);
      columns.forEach(({ node: cell }, i) => {
        show(i);
        cell.classList.toggle("selected", i === selected);
        if (onChange) cell.tabIndex = i === selected ? 0 : -1;
      });
      lines.replaceChildren(...flips.flatMap(({ value, text }, i) => {
        const share = value / top;
        const crowded = flips.some((other, j) => j > i && Math.abs(other.value - value) < 0.12 * top);
        if (!(share > 0.04) || share > 1) return [];
        return [1, -1].map((side) => h("div", { class: "flip", style: `top:${50 - side * share * 50}%` }, side > 0 && !crowded ? h("span", {}, text) : ""));
      }));
    }

    function set(i, value) {
      onChange(i, mx.bitsOf(Math.fround(Math.min(Math.max(value, -3.4028234663852886e38), 3.4028234663852886e38))));
    }

    function drag(event) {
      const box = node.getBoundingClientRect();
      const middle = box.top + box.height / 2;
      const share = Math.min(Math.max((middle - event.clientY) / (box.height / 2), -1), 1);
      set(dragged, (Math.round(share * 256) / 256) * top);
    }

    if (onChange) {
      node.addEventListener("pointerdown", (event) => {
        const cell = event.target.closest(".column");
        if (!cell || event.button !== 0) return;
        const chosen = Number(cell.dataset.element);
        if (event.pointerType === "touch" && !cell.classList.contains("selected")) return void onSelect(chosen); // it may be a scroll
        dragged = chosen;
        node.setPointerCapture(event.pointerId);
        onSelect(dragged);
        columns[dragged].node.focus({ preventScroll: true });
        event.preventDefault();
      });
      let moved = false;
      node.addEventListener("pointermove", (event) => {
        if (dragged === null) return;
        moved = true;
        drag(event);
      });
      const stop = () => {
        if (dragged === null) return;
        dragged = null;
        if (moved) onChange(-1, 0);
        moved = false;
      };
      node.addEventListener("pointerup", stop);
      node.addEventListener("pointercancel", stop);
      node.addEventListener("keydown", (event) => key(event));
    }

    function key(event) {
      const i = Number(event.target.dataset.element);
      const value = mx.valueOf(words[i]);
      const step = event.key === "ArrowUp" ? 1 : event.key === "ArrowDown" ? -1 : 0;
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const next = (i + (event.key === "ArrowRight" ? 1 : words.length - 1)) % words.length;
        onSelect(next);
        columns[next].node.focus({ preventScroll: true });
      } else if (step && event.shiftKey) onChange(i, neighbour(words[i], step));
      else if (step) set(i, Number.isFinite(value) ? value + (step * top) / 64 : 0);
      else if (event.key === "-") onChange(i, (words[i] ^ 0x80000000) >>> 0);
      else if (event.key === "PageUp") set(i, value * 2);
      else if (event.key === "PageDown") set(i, value / 2);
      else if (event.key === "Home") set(i, 0);
      else return;
      event.preventDefault();
    }

    return { node, draw };
  }

  /** The next float32 up (1) or down (-1). */
  function neighbour(word, step) {
    const ordered = word >>> 31 ? 0x80000000 - (word & 0x7fffffff) - 1 : 0x80000000 + word;
    const next = Math.min(Math.max(ordered + step, 0x80000000 - 0x7f800001), 0x80000000 + 0x7f800000);
    return next >= 0x80000000 ? next - 0x80000000 : (0x80000000 - 1 - next + 0x80000000) >>> 0;
  }

  /** The magnitudes near a block's amax at which its scale byte changes, with the byte above each. */
  function flips(block) {
    const { scale, treatment } = block;
    const byteOf = (word) => mx.scaleOf(word, treatment, scale).byte;
    const turns = { rule: powerTurns, nearest: nearestTurns }[scale.kind]?.(block, byteOf) ?? [];
    return turns.filter((word) => word < mx.INFINITY_BITS).map((word) => {
      const value = mx.valueOf(word);
      return { value, text: `byte ${ui.hex2(byteOf(word))} from ${numbers.show(value)}` };
    });
  }

  function powerTurns({ scale, element, treatment }) {
    const turn = mx.turn(treatment.scale_rule, element);
    const at = (E) => (((turn === 0x800000 ? E + 1 : E) << 23) | (turn & 0x7fffff)) >>> 0;
    return scale.E > 1 ? [at(scale.E - 1), at(scale.E)] : [at(scale.E)];
  }

  /** The first float32 at or above the middle of two scales that gets the upper one. */
  function nearestTurns({ scale, element, format }, byteOf) {
    if (scale.chosen || (!scale.given && scale.amax === scale.A)) return []; // the tensor's scale moves with the number
    const { grid } = format.scale;
    return [scale.byte, scale.byte + 1].filter((code) => code > 0 && code < grid.length).flatMap((code) => {
      const middle = mx.bitsOf(((grid[code - 1] + grid[code]) / 2) * element.M * scale.t);
      // An order of float32 operations turns near the middle, or not at all where its scales have a least one.
      for (let word = Math.max(middle - 64, 1); word <= middle + 64; word++) {
        if (byteOf(word - 1) < code && byteOf(word) >= code) return [word];
      }
      return [];
    });
  }

  return { plot, flips, neighbour };
})();
