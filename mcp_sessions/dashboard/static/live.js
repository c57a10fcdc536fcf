// Says whether the page is live. All else is in the page.
(() => {
  const sign = document.getElementById("sign");
  const say = (state, text) => {
    sign.dataset.state = state;
    sign.textContent = text;
  };
  say("waits", "connecting");
  let came = false;
  const late = setTimeout(() => {
    if (!came) say("late", "not live: no change arrives. Does a proxy buffer?");
  }, 6000);
  document.addEventListener("htmx:sse:after:message", () => {
    came = true;
    clearTimeout(late);
    say("live", "live");
  });
  for (const event of ["htmx:sse:error", "htmx:sse:close", "htmx:response:error", "htmx:error"]) {
    document.addEventListener(event, () => {
      clearTimeout(late);
      say("off", "not live: load the page again");
    });
  }
})();
