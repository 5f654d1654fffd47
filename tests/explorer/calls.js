// What the backend of the tests asks of the page's arithmetic: arrays lie in one memory that both languages see.
"use strict";

let memory = new ArrayBuffer(0);

/** Views of the memory, each given as the name of its type, its first byte and its length. */
const views = (places) => places.map(([type, first, count]) => new globalThis[type](memory, first, count));

function quantizeArrays(places, length, treatment, negative, stream, globalLength, first, A, t) {
  const [words, rows, codes, scales] = views(places);
  const starts = Array.from(rows, (row) => row * BigInt(globalLength) + BigInt(first));
  const made = mx.quantize(words, length, treatment, negative, { stream, starts, A, t });
  codes.set(mx.pack(made.codes, mx.FORMATS[treatment.format].element.bits));
  scales.set(made.scales);
}

/** The scale of the tensor whose rows are given, or that has an amax. */
function tensorScaleArrays(places, treatment, n, negative, amax) {
  const [words, made] = views(places);
  const y = n ? new Uint32Array(mx.hadamard(new Float32Array(words.slice().buffer), n, negative).buffer) : words;
  made[0] = mx.tensorScale(amax ?? mx.tensorAmax(y), treatment);
}

function dequantizeArrays(places, format, type, t) {
  const [packed, scales, values] = views(places);
  const exact = mx.dequantize(mx.unpack(packed, mx.FORMATS[format].element.bits), scales, format, t ?? 1);
  if (type !== "bfloat16") values.set(exact); // a Float32Array rounds what it is given
  else values.set(mx.toBfloat16(new Uint32Array(Float32Array.from(exact).buffer)));
}

function transformArrays(places, n, negative) {
  const [x, y] = views(places);
  y.set(mx.hadamard(x, n, negative));
}

const integersOf = (stream, start, count, R) => [...mx.integers(stream, BigInt(start), count, R)];
const packed = (codes, bits) => [...mx.pack(codes, bits)];
const unpacked = (bytes, bits) => [...mx.unpack(bytes, bits)];

/** What the page shows at an address, with floats as text that Python reads back exactly. */
function shownAt(hash) {
  const state = link.read(hash);
  const made = explain.block(state, state.a);
  const text = (value) => (value === undefined || value === null ? null : String(value));
  return {
    again: link.write(state),
    byte: made.scale.byte,
    e: made.scale.e ?? null,
    amax: made.format.tensorScale ? text(made.scale.A) : null,
    t: made.format.tensorScale ? text(made.scale.t) : null,
    quotient: text(made.scale.quotient),
    neighbours: made.scale.kind === "nearest" ? [made.scale.low, made.scale.high].map((code) => text(made.format.scale.grid[code])) : null,
    amaxAt: made.scale.at,
    packed: [...made.packed],
    snr: text(made.snr),
    worst: text(made.worst),
    elements: made.elements.map((e) => ({
      xBits: e.xBits, yBits: e.yBits, sign: e.negative ? -1 : 1, code: e.code, kind: e.kind, v: text(e.v),
      lower: text(e.lower), upper: text(e.upper), T: e.T ?? null, r: e.draw ? e.draw.r : null,
      value: text(e.value), error: text(e.error),
    })),
  };
}

function refusal(address) {
  try {
    link.read(address);
  } catch (error) {
    return { name: error.constructor.name, message: error.message };
  }
  return null;
}

function inFormat(text, format) {
  const treatment = link.inFormat(link.readTreatment(text), format);
  link.checkTreatment(treatment);
  return { ...treatment, text: link.treatmentText(treatment) };
}

const wordsOf = (text) => numbers.parse(text).map(link.hex).join(" ");
const shownNumber = (word) => numbers.show(mx.valueOf(word));
const presets = () => Object.fromEntries(Object.entries(numbers.PRESETS).map(([name, make]) => [name, make()]));
