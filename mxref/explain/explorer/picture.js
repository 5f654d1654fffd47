// A small picture, quantized block by block along its rows.
"use strict";

const picture = (() => {
  const { h } = ui;
  const WIDTH = 128;
  const HEIGHT = 80;

  /** A landscape in shades of grey: a dark hill, a bright sun, a sky between. */
  function scene() {
    const { philox } = mx;
    return Float32Array.from({ length: WIDTH * HEIGHT }, (_, i) => {
      const [px, py] = [i % WIDTH, Math.floor(i / WIDTH)];
      const grain = (philox([i, 0, 0, 0], [1, 0])[0] / 0x100000000 - 0.5) * 0.05;
      const sky = 0.18 + (0.55 * py) / HEIGHT;
      const sun = Math.exp(-(((px - 92) ** 2 + (py - 24) ** 2) / 90)) * 0.8;
      const far = py > 48 + 7 * Math.sin(px / 17) ? 0.3 : null;
      const near = py > 60 + 10 * Math.sin(px / 29 + 2) + 2 * Math.sin(px / 5) ? 0.07 : null;
      return Math.min(Math.max((near ?? far ?? sky + sun) + grain * (near ? 0.6 : 1), 0), 1);
    });
  }

  /** The grey values of an image file, fitted into the picture's size. */
  async function fromFile(file) {
    const image = await createImageBitmap(file);
    const canvas = h("canvas", { width: WIDTH, height: HEIGHT });
    const context = canvas.getContext("2d");
    const scale = Math.max(WIDTH / image.width, HEIGHT / image.height);
    context.drawImage(image, (WIDTH - image.width * scale) / 2, (HEIGHT - image.height * scale) / 2, image.width * scale, image.height * scale);
    const { data } = context.getImageData(0, 0, WIDTH, HEIGHT);
    return Float32Array.from({ length: WIDTH * HEIGHT }, (_, i) =>
      (0.299 * data[4 * i] + 0.587 * data[4 * i + 1] + 0.114 * data[4 * i + 2]) / 255);
  }

  const lengthOf = (treatment) => mx.FORMATS[treatment.format].k;

  /** The picture after quantization, transform and prescale undone; and how much was lost. */
  function quantized(pixels, treatment, stream) {
    const unit = Math.max(lengthOf(treatment), treatment.hadamard);
    const length = Math.ceil(WIDTH / unit) * unit;
    const tile = mx.rowsOf(treatment);
    const rows = Math.ceil(HEIGHT / tile) * tile;
    const x = new Float32Array(rows * length);
    for (let row = 0; row < HEIGHT; row++) x.set(pixels.subarray(row * WIDTH, (row + 1) * WIDTH), row * length);
    const n = treatment.hadamard;
    const negative = n ? mx.signVector(n, treatment.signs, stream, treatment.sign_vector) : [];
    const starts = Array.from({ length: rows }, (_, row) => BigInt(row * length));
    const made = mx.quantize(new Uint32Array(x.buffer), length, treatment, negative, { stream, starts, others: 0 });
    const undo = treatment.prescale ? mx.FORMATS[treatment.format].element.prescale : 1;
    let values = Float32Array.from(mx.dequantize(made.codes, made.scales, treatment.format, made.t), (value) => value / undo);
    if (n) values = mx.inverseHadamard(values, n, negative);
    const out = new Float32Array(WIDTH * HEIGHT);
    for (let row = 0; row < HEIGHT; row++) out.set(values.subarray(row * length, row * length + WIDTH), row * WIDTH);
    const signal = pixels.reduce((total, value) => total + value * value, 0);
    const noise = pixels.reduce((total, value, i) => total + (value - out[i]) ** 2, 0);
    return { out, length, A: made.A, mse: noise / out.length, snr: noise ? 10 * Math.log10(signal / noise) : Infinity };
  }

  function paint(canvas, shade) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(WIDTH, HEIGHT);
    for (let i = 0; i < WIDTH * HEIGHT; i++) {
      const grey = Math.round(255 * Math.min(Math.max(shade(i), 0), 1));
      image.data.set([grey, grey, grey, 255], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }

  const kept = new Map();
  let keptPixels = null;

  /** The result for a treatment, kept as long as picture and stream stay. */
  function result(pixels, treatment, stream) {
    const key = `${link.treatmentText(treatment)} ${Object.values(stream).join(" ")}`;
    if (keptPixels !== pixels || kept.size > 64) {
      kept.clear();
      keptPixels = pixels;
    }
    if (!kept.has(key)) kept.set(key, quantized(pixels, treatment, stream));
    return kept.get(key);
  }

  /** Build the step once; the function that it returns shows the state again. */
  function build(node, app) {
    let pixels = scene();
    let place = { row: 24, block: 2 };
    const views = ["original", "a", "b"].map((name) => {
      const canvas = h("canvas", { width: WIDTH, height: HEIGHT, role: "img" });
      const caption = h("figcaption", {});
      const mark = h("span", { class: "block" });
      const pick = h("div", { class: "view", tabindex: 0, role: "button", "aria-label": `choose a block of the picture, ${name}` }, canvas, mark);
      pick.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect();
        choose(Math.floor(((event.clientY - box.top) / box.height) * HEIGHT), Math.floor(((event.clientX - box.left) / box.width) * (WIDTH / lengthOf(app.state[app.side]))));
        take();
      });
      pick.addEventListener("keydown", (event) => {
        const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (step) choose(place.row + step[0], place.block + step[1]);
        else if (event.key === "Enter" || event.key === " ") take();
        else return;
        event.preventDefault();
      });
      return { name, canvas, caption, mark, figure: h("figure", {}, pick, caption) };
    });
    const file = h("input", {
      type: "file", accept: "image/*", class: "unseen", id: "file", onchange: async () => {
        try {
          pixels = await fromFile(file.files[0]);
          app.update();
        } catch {
          app.say("The browser cannot read this file as a picture.");
        }
      },
    });

    function choose(row, block) {
      const k = lengthOf(app.state[app.side]);
      place = { row: Math.min(Math.max(row, 0), HEIGHT - 1), block: Math.min(Math.max(block, 0), WIDTH / k - 1) };
      for (const { mark } of views) {
        mark.style.left = `${(100 * place.block * k) / WIDTH}%`;
        mark.style.width = `${(100 * k) / WIDTH}%`;
        mark.style.top = `${(100 * place.row) / HEIGHT}%`;
      }
    }

    /** Take the numbers of the chosen block, with the groups of the transform that it lies in, into the first step. */
    function take() {
      const treatment = app.state[app.side];
      const k = lengthOf(treatment);
      const unit = Math.max(k, treatment.hadamard);
      const first = Math.floor((place.block * k) / unit) * unit;
      const { length, A } = result(pixels, treatment, app.state.stream);
      const row = pixels.subarray(place.row * WIDTH + first, place.row * WIDTH + Math.min(first + unit, WIDTH));
      app.change({ words: Array.from(row, mx.bitsOf), block: Math.floor((place.block * k - first) / lengthOf(app.state.a)), amax: A, at: BigInt(place.row * length + first) });
      app.say(`Block ${place.block} of row ${place.row} is now in step 1.`);
    }

    node.replaceChildren(
      ui.head(7, "A picture, block by block", `${WIDTH} x ${HEIGHT} shades from 0 to 1, in blocks along the rows. Click a block to take its numbers to step 1.`, ["dequantize.value", "hadamard.inverse"]),
      h("div", { class: "pictures" }, views.map((view) => view.figure)),
      h("p", {}, file, h("label", { class: "plain button", for: "file" }, "Open a picture of yours")));
    choose(place.row, place.block);

    return ui.onlyChanged(() => [pixels, app.side, app.state.a, app.state.b, app.state.stream], () => {
      const { state } = app;
      choose(place.row, place.block);
      const a = result(pixels, state.a, state.stream);
      const b = state.b ? result(pixels, state.b, state.stream) : null;
      const quality = ({ snr, mse }) => `SNR ${snr === Infinity ? "exact" : `${snr.toFixed(2)} dB`}, MSE ${words.brief(mse, 3)}`;
      const side = (name) => h("b", { class: `side ${name}` }, name.toUpperCase());
      paint(views[0].canvas, (i) => pixels[i]);
      views[0].caption.replaceChildren("original, 32 bits per element");
      paint(views[1].canvas, (i) => a.out[i]);
      views[1].caption.replaceChildren(...(b ? [side("a"), " "] : []), quality(a));
      if (b) {
        paint(views[2].canvas, (i) => b.out[i]);
        views[2].caption.replaceChildren(side("b"), " ", quality(b));
      } else {
        paint(views[2].canvas, (i) => Math.abs(a.out[i] - pixels[i]) * 8);
        views[2].caption.replaceChildren("error, 8 times as bright");
      }
    });
  }

  return { build };
})();
