// Opens each page of the built site in a frame of one width, and reports its faults to the test.
// The frame is as wide as the reader's window would be.

const WORD = /[\p{L}\p{N}_]+/gu;
const LEAST_CONTRAST = 4.5;
const WIDE = 1280;
const LONGEST = 22000;
const CODE = "div.highlight > pre";

const loaded = (frame, url) =>
  new Promise((resolve) => {
    frame.addEventListener("load", () => requestAnimationFrame(resolve), { once: true });
    frame.src = url;
  });

function* wordsOf(element) {
  const texts = element.ownerDocument.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const found of texts.currentNode.data.matchAll(WORD)) {
      const range = element.ownerDocument.createRange();
      range.setStart(texts.currentNode, found.index);
      range.setEnd(texts.currentNode, found.index + found[0].length);
      yield [found[0], range];
    }
  }
}

const linesOf = (range) =>
  new Set([...range.getClientRects()].filter((box) => box.width > 0).map((box) => Math.round(box.top)));

function channels(colour) {
  const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
  return { rgb: [red, green, blue], alpha };
}

function luminance(rgb) {
  const [red, green, blue] = rgb.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function backgroundOf(element, page) {
  for (let at = element; at; at = at.parentElement) {
    const { rgb, alpha } = channels(page.getComputedStyle(at).backgroundColor);
    if (alpha > 0.5) return rgb;
  }
  return [255, 255, 255];
}

function contrastOf(element, page) {
  const text = luminance(channels(page.getComputedStyle(element).color).rgb);
  const behind = luminance(backgroundOf(element, page));
  return (Math.max(text, behind) + 0.05) / (Math.min(text, behind) + 0.05);
}

async function copies(block, page) {
  let copied = null;
  const clipboard = { writeText: async (text) => { copied = text; } };
  Object.defineProperty(page.navigator, "clipboard", { value: clipboard, configurable: true });
  block.querySelector("button.copy")?.click();
  await Promise.resolve();
  return copied?.trim() === block.querySelector("pre").textContent.trim();
}

const scrolls = (box) => box.scrollWidth > box.clientWidth;

function covers(button, code) {
  const [one, other] = [button.getBoundingClientRect(), code.getBoundingClientRect()];
  return one.left < other.right && other.left < one.right && one.top < other.bottom;
}

// On a wide screen only: on a telephone code scrolls, and everything is long.
function faultsOfSize(article) {
  const faults = [];
  for (const code of article.querySelectorAll(CODE)) {
    if (scrolls(code)) faults.push(`has code that scrolls: ${code.textContent.slice(0, 60)}`);
  }
  if (article.scrollHeight > LONGEST) faults.push(`is too long: ${article.scrollHeight} pixels`);
  return faults;
}

async function faultsOf(page, background) {
  const faults = [];
  const root = page.document.documentElement;
  const article = page.document.querySelector("article");
  if (root.scrollWidth > root.clientWidth) {
    faults.push(`scrolls sideways: ${root.scrollWidth} of ${root.clientWidth} pixels`);
  }
  for (const element of article.querySelectorAll("h1, h2, h3, h4, h5, a")) {
    for (const [word, range] of wordsOf(element)) {
      if (linesOf(range).size > 1) faults.push(`breaks in a word: ${word} of ${element.textContent}`);
    }
  }
  for (const block of article.querySelectorAll("div.highlight")) {
    if (!(await copies(block, page))) faults.push(`is not copied: ${block.textContent.slice(0, 60)}`);
    const button = block.querySelector("button.copy");
    if (button && covers(button, block.querySelector("pre"))) {
      faults.push(`has a button on its code: ${block.textContent.slice(0, 60)}`);
    }
  }
  for (const element of article.querySelectorAll("h1, h2, p, a, td, th, code, pre, pre span")) {
    const contrast = contrastOf(element, page);
    if (element.textContent.trim() && contrast < LEAST_CONTRAST) {
      faults.push(`is hard to see (${contrast.toFixed(1)}): ${element.textContent.slice(0, 60)}`);
    }
  }
  if (page.innerWidth >= WIDE) faults.push(...faultsOfSize(article));
  for (const picture of article.querySelectorAll(`img.only-${background}`)) {
    if (!picture.checkVisibility()) faults.push(`hides its picture: ${picture.src}`);
  }
  const isLight = luminance(backgroundOf(article, page)) > 0.5;
  if (isLight !== (background === "light")) faults.push(`is not ${background}`);
  return faults;
}

const asked = new URLSearchParams(location.search);
const report = { measured: 0, faults: [] };
try {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${asked.get("width")}px; height: 900px; border: 0`;
  document.body.append(frame);
  for (const url of await (await fetch("/pages.json")).json()) {
    await loaded(frame, url);
    for (const fault of await faultsOf(frame.contentWindow, asked.get("background"))) {
      report.faults.push(`${url} ${fault}`);
    }
    report.measured += 1;
  }
} catch (failed) {
  report.faults.push(`${failed}\n${failed.stack}`);
}
await fetch("/report", { method: "POST", body: JSON.stringify(report) });
