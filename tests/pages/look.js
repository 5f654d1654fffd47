// What is wrong with the page as it is displayed: too wide, letters of drawings too small, images that are not there.
(() => {
  const LEAST = 10;
  const root = document.documentElement;
  const wrong = [];
  if (root.scrollWidth > root.clientWidth) {
    const reach = (node) => node.getBoundingClientRect().right;
    const frames = "[class*=wrapper], .highlight, pre, .chart, .frame, .wide, .spec-figure, aside, .sidebar-drawer, .toc-drawer";
    const wide = [...document.body.querySelectorAll("*")]
      .filter((node) => reach(node) > root.clientWidth + 1 && !node.closest(frames))
      .map((node) => `${node.tagName.toLowerCase()}.${node.className.baseVal ?? node.className}`);
    wrong.push(`the page is ${root.scrollWidth} pixels wide: ${[...new Set(wide)].slice(0, 4).join(", ")}`);
  }
  for (const text of document.querySelectorAll("svg text")) {
    if (!text.textContent.trim() || !text.checkVisibility()) continue;
    const svg = text.ownerSVGElement;
    // Letters may be squeezed or turned; their height is the font's, times the scale of the drawing.
    const scale = Math.min(svg.getScreenCTM().d, svg.getScreenCTM().a);
    const height = parseFloat(getComputedStyle(text).fontSize) * scale;
    if (height < LEAST - 0.05) wrong.push(`letters of ${height.toFixed(1)} pixels: ${text.textContent.trim().slice(0, 30)}`);
  }
  for (const image of document.images) {
    if (image.complete && !image.naturalWidth) wrong.push(`no image ${image.src}`);
  }
  for (const frame of document.querySelectorAll(".chart, .frame, .spec-figure, .figure, figure")) {
    if (frame.scrollWidth > frame.clientWidth + 1 && !["auto", "scroll"].includes(getComputedStyle(frame).overflowX)) {
      wrong.push(`a drawing is cut: ${frame.className}`);
    }
  }
  return [...new Set(wrong)];
})()
