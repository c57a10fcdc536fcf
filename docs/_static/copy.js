// A button beside each block of code that copies its text. It has a column of its own.
const icon = (path) =>
  `<svg viewBox="0 0 16 16" width="16" height="16" fill="none" stroke="currentColor"
    stroke-width="1.5" aria-hidden="true"><path d="${path}"/></svg>`;
const COPY = icon("M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3");
const COPIED = icon("M3 8.5l3.5 3.5L13 4.5");

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.title = "Copy";
    button.setAttribute("aria-label", "Copy");
    button.innerHTML = COPY;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").innerText);
      button.innerHTML = COPIED;
    });
    block.append(button);
  }
});
