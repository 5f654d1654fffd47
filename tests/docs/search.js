// What Sphinx's searchtools.js takes from a browser, as far as a search without a page needs it.
const document = { getElementById: () => null, addEventListener: () => {} };
const window = globalThis;
const localStorage = { setItem: () => {} };
const SPHINX_HIGHLIGHT_ENABLED = false;
const _ready = () => {};
var Stemmer;

function found(query) {
  return Search._performSearch(...Search._parseQuery(query)).reverse().map((result) => result[0]);
}
const _ = (text) => text;
