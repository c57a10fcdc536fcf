// Asks the built site's own search, without a browser: node search.mjs SITE < questions
// (a JSON list of texts); prints for each the list of pages found, best first.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const site = process.argv[2];
const questions = JSON.parse(readFileSync(0, "utf8"));
const ready = [];
const nothing = { childNodes: [], classList: { add() {} }, removeChild() {}, remove() {} };
const context = vm.createContext({
  console,
  localStorage: { setItem() {} },
  SPHINX_HIGHLIGHT_ENABLED: false,
  DOCUMENTATION_OPTIONS: {},
  window: {},
  document: {
    readyState: "loading",
    addEventListener: (_, run) => ready.push(run),
    getElementById: () => ({ children: [], firstChild: null, lastChild: null, ...nothing }),
  },
});
context.window = context;
const load = (...path) => vm.runInContext(readFileSync(join(site, ...path), "utf8"), context);
load("_static", "doctools.js");
load("_static", "language_data.js");
load("_static", "searchtools.js");
load("_static", "search.js");
// The last one to ask to be called is ours; Sphinx's own would look at the page.
ready.at(-1)();
context.questions = questions;
vm.runInContext(`Search.setIndex = (index) => { Search._index = index; };`, context);
load("searchindex.js");
const found = vm.runInContext(
  `questions.map((question) => {
     const results = Search._performSearch(...Search._parseQuery(question));
     return [...new Set(results.reverse().map((result) => result[0]))];
   })`,
  context,
);
console.log(JSON.stringify(found));
