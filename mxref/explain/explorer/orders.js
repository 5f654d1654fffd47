// The orders of float32 operations that implementations have (scale.arithmetic).
"use strict";

/**
 * Each order has t of A (`tensor`), what is rounded to a scale (`block`) and to an element (`element`), and the code of
 * a scale (`cast`). `format` has M and S; `scale` its numbers `grid`, their mantissa bits, and `nearest`, which takes
 * a number and whether halves go up.
 */
const orders = (() => {
  const f = Math.fround; // of a sum, product or quotient of two float32 numbers: a double holds it well enough
  const LARGEST = f(3.4028234663852886e38);
  const SMALLEST_NORMAL = f(1.1754943508222875e-38);

  /** The cast to the nearest scale of at least `least`, which is also that of 0 / 0. */
  const nearestFrom = (least) => (q, scale) => scale.nearest(Number.isNaN(q) ? least : Math.max(q, least));

  const inverseTE = (A, { M, S }) => (A === 0 ? 1 : Math.min(f((M * S) / A), LARGEST));
  const te = {
    tensor: (A, format) => f(1 / inverseTE(A, format)),
    block: (a, { A }, format) => f(a * f(inverseTE(A, format) * f(1 / format.M))),
    cast: nearestFrom(0),
    element: (x, s, { A }, format) => f(x * Math.min(f(1 / f(s * f(1 / inverseTE(A, format)))), LARGEST)),
  };

  function inverseCT(A, { M, S }) {
    const g = f(f(1 / Math.max(A, SMALLEST_NORMAL)) * (M * S));
    return Number.isFinite(g) ? g : 1;
  }

  /** Halves up; a scale with the largest exponent is the largest, and one below the normal scales stays below. */
  function castGGML(q, { grid, mantissaBits, nearest }) {
    const firstNormal = 1 << mantissaBits;
    const steps = f(f(q / grid[1]) + 0.5);
    const code = q < grid[firstNormal] ? Math.min(Math.floor(steps), firstNormal - 1) : nearest(q, true);
    const last = grid.length - 1;
    return code >= last - (last % firstNormal) ? last : code;
  }

  /** A real quotient, below the middle of two magnitudes where it lies on it. */
  function elementGGML(x, s, tensor, { magnitudes }) {
    const v = s === 0 ? 0 : x / s;
    const halfway = magnitudes.some((low, i) => v === (low + magnitudes[i + 1]) / 2);
    return halfway ? v * (1 - Number.EPSILON / 2) : v;
  }

  return {
    te,
    te_2_13: { ...te, block: (a, { A }, format) => f(f(a / format.M) * inverseTE(A, format)) },
    torchao: {
      tensor: (A, { M, S }) => f(A / (M * S)),
      block: (a, { t }, { M }) => f(f(a / M) / t),
      cast: nearestFrom(1 / 64),
      element: (x, s, { t }) => f(x * f(f(1 / t) / s)),
    },
    modelopt: {
      tensor: (A, { M, S }) => f(A / (M * S)),
      block: (a, { t }, { M }) => f(a / f(M * t)),
      cast: (q, scale) => nearestFrom(1 / 512)(q > 0 ? q : 1, scale),
      element: (x, s, { t }) => f(x / f(s * t)),
    },
    compressed_tensors: {
      tensor: (A, format) => f(1 / inverseCT(A, format)),
      block: (a, { A }, format) => f(inverseCT(A, format) * f(a / format.M)),
      cast: (q, { nearest }) => nearest(q) || nearest(1 / 8),
      element: (x, s, { A }, format) => f(x / f(s / inverseCT(A, format))),
    },
    ggml: {
      tensor: () => 1,
      block: (a, tensor, { M }) => f(a / M),
      cast: castGGML,
      element: elementGGML,
    },
  };
})();
