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
    const grounds = [behind(svg ? svg.parentElement : node)];
    if (svg && node.classList.contains("end")) grounds.push(parts(getComputedStyle(svg.querySelector(".over")).fill).slice(0, 3));
    const colour = parts(svg ? style.fill : style.color);
    for (const ground of grounds) {
      const ratio = contrast(over(colour, ground), ground);
      if (ratio < 4.5) faint.push(`${walker.currentNode.textContent.trim().slice(0, 40)} (${node.className.baseVal ?? node.className}): ${ratio.toFixed(2)}`);
    }
  }
  return [...new Set(faint)];
})()
