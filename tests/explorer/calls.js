// What the backend of the tests asks of the page's arithmetic: arrays lie in one memory that both languages see.
"use strict";

let memory = new ArrayBuffer(0);

/** Views of the memory, each given as the name of its type, its first byte and its length. */
const views = (places) => places.map(([type, first, count]) => new globalThis[type](memory, first, count));

function quantizeArrays(places, length, treatment, negative, stream, globalLength, first) {
  const [words, rows, codes, scales] = views(places);
  const starts = Array.from(rows, (row) => row * BigInt(globalLength) + BigInt(first));
  const made = mx.quantize(words, length, treatment, negative, { stream, starts });
  codes.set(mx.pack(made.codes, mx.FORMATS[treatment.format].element.bits));
  scales.set(made.scales);
}

function dequantizeArrays(places, format, type) {
  const [packed, scales, values] = views(places);
  const exact = mx.dequantize(mx.unpack(packed, mx.FORMATS[format].element.bits), scales, format);
  if (type !== "bfloat16") values.set(exact); // a Float32Array rounds what it is given
  else values.set(mx.toBfloat16(new Uint32Array(Float32Array.from(exact).buffer)));
}

function transformArrays(places, n, negative) {
  const [x, y] = views(places);
  y.set(mx.hadamard(x, n, negative));
}

const integersOf = (stream, start, count, R) => [...mx.integers(stream, BigInt(start), count, R)];
const packed = (codes) => [...mx.pack(codes, 4)];
const unpacked = (bytes) => [...mx.unpack(bytes, 4)];
