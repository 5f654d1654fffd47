// The texts of the page whose contrast with what lies behind them is below 4.5 (WCAG 2.1, 1.4.3).
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  /** Red, green, blue and opacity of a colour in any notation, as the browser paints it. */
  function parts(colour) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }

  function over(front, back) {
    const share = front[3] / 255;
    return front.slice(0, 3).map((value, i) => value * share + back[i] * (1 - share));
  }

  function behind(node) {
    if (!node || node === document) return parts(getComputedStyle(document.documentElement).backgroundColor).slice(0, 3);
    const own = parts(getComputedStyle(node).backgroundColor);
    return own[3] === 255 ? own.slice(0, 3) : over(own, behind(node.parentElement));
  }

  /** What lies behind a text of a drawing: the last shape drawn before it that covers its middle, or the page. */
  function drawnBehind(text, svg) {
    let ground = behind(svg.parentElement);
    const own = parts(getComputedStyle(svg).backgroundColor);
    if (own[3]) ground = over(own, ground);
    const box = text.getBoundingClientRect();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    for (const shape of svg.querySelectorAll("rect, circle, path, polygon")) {
      if (text.compareDocumentPosition(shape) & Node.DOCUMENT_POSITION_FOLLOWING) break;
      const place = shape.getBoundingClientRect();
      const style = getComputedStyle(shape);
      if (style.fill === "none" || shape.closest("defs, clipPath") || !shape.checkVisibility()) continue;
      if (place.left > x || place.right < x || place.top > y || place.bottom < y) continue;
      const fill = parts(style.fill);
      ground = over([...fill.slice(0, 3), fill[3] * style.fillOpacity * style.opacity], ground);
    }
    return ground;
  }

  function luminance(colour) {
    const [r, g, b] = colour.map((value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function contrast(a, b) {
    const [low, high] = [luminance(a), luminance(b)].sort((p, q) => p - q);
    return (high + 0.05) / (low + 0.05);
  }

  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest("script, noscript, option, .unseen")) continue;
    const svg = node.closest("svg");
    const style = getComputedStyle(node);
    const grounds = [svg ? drawnBehind(node, svg) : behind(node)];
    if (svg && node.classList.contains("end")) grounds.push(parts(getComputedStyle(svg.querySelector(".over")).fill).slice(0, 3));
    const colour = parts(svg ? style.fill : style.color);
    for (const ground of grounds) {
      const ratio = contrast(over(colour, ground), ground);
      if (ratio < 4.5) faint.push(`${walker.currentNode.textContent.trim().slice(0, 40)} (${node.className.baseVal ?? node.className}): ${ratio.toFixed(2)}`);
    }
  }
  return [...new Set(faint)];
})()
