// Refreshes the live parts of a page: an element with data-refresh="seconds" receives the event of its hx-trigger
// ("refresh", or "refresh-fast" for 1 s), and htmx requests it again. Nothing is refreshed while the tab is hidden or
// updates are paused, and no table under the pointer. Charts listen for "tick" on document, once a second. If the server
// is unreachable, the marker shows that and the page stays as it is.
const STATES = {
  live: "Live",
  paused: "Paused",
  fixed: "Fixed range",
  error: "Control plane unreachable; the page is not up to date. Routers continue to serve.",
};

// A table under the pointer is being read or clicked, so it is not replaced until the pointer leaves it.
const POINTED = ":is(table, .events):hover";

let paused = false;

export function startLive() {
  const marker = document.querySelector("[data-live]");
  const button = document.querySelector("[data-pause]");
  const fixed = marker?.dataset.live === "fixed";
  const show = (state) => {
    if (!marker) return;
    marker.dataset.state = state;
    const text = marker.querySelector("[data-live-text]");
    if (text.textContent !== STATES[state]) text.textContent = STATES[state];
  };
  const pause = (value) => {
    paused = value;
    if (button) button.textContent = paused ? "Resume" : "Pause";
    show(paused ? "paused" : "live");
    if (!paused) tick(1, true);
  };
  if (fixed) show("fixed");
  else {
    if (marker) show("live");
    if (button) button.hidden = false;
    button?.addEventListener("click", () => pause(!paused));
    document.addEventListener("pausetoggle", () => pause(!paused));
    document.addEventListener("visibilitychange", () => document.hidden || tick(1, true));
    let seconds = 0;
    setInterval(() => tick(++seconds), 1000);
  }
  document.addEventListener("htmx:after:request", (event) => onResponse(event.detail.ctx, show));
  document.addEventListener("htmx:error", () => show("error"));
  document.addEventListener("livestate", (event) => paused || fixed || show(event.detail));
}

function tick(seconds, now = false) {
  if (paused || document.hidden) return;
  document.dispatchEvent(new CustomEvent("tick", { detail: { now } }));
  for (const element of document.querySelectorAll("[data-refresh]")) {
    const every = Number(element.dataset.refresh);
    if (every && (now || seconds % every === 0) && !element.querySelector(POINTED)) {
      element.dispatchEvent(new CustomEvent(element.getAttribute("hx-trigger") ?? "refresh"));
    }
  }
}

function onResponse(ctx, show) {
  const raw = ctx?.response?.raw;
  if (!raw) return;
  if (raw.redirected && new URL(raw.url).pathname.startsWith("/accounts/")) location.reload();
  else if (ctx.sourceElement?.dataset.refresh && !paused) show(raw.ok ? "live" : "error");
}
