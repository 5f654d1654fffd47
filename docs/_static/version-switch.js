// A switch between the versions that `versions.js` lists, in the folder above these pages. It needs no server: a page of
// the file system may load a script, but may not read JSON. Without the list, or with one version, there is no switch.
"use strict";

(() => {
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const own = root.pathname.split("/").at(-2);
  const page = location.href.split(/[?#]/)[0].slice(root.href.length) || "index.html";

  function show() {
    const versions = window.mxrefVersions.versions;
    const sidebar = document.querySelector(".sidebar-scroll") ?? document.querySelector("nav, aside");
    if (versions.length < 2 || !sidebar) return;
    const select = document.createElement("select");
    for (const { folder } of versions) select.add(new Option(folder, folder, folder === own, folder === own));
    select.addEventListener("change", () => {
      const chosen = versions.find(({ folder }) => folder === select.value);
      const target = chosen.pages.includes(page) ? page : "index.html";
      location.href = new URL(`../${chosen.folder}/${target}`, root).href;
    });
    const label = document.createElement("label");
    label.className = "version-switch";
    label.append("Version ", select);
    sidebar.prepend(label);
  }

  const list = document.createElement("script");
  list.src = new URL("../versions.js", root).href;
  list.addEventListener("load", show);
  document.head.append(list);
})();
