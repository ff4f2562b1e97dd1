// Live parts of a page: an element with data-refresh="seconds" asks htmx for itself again by the event its hx-trigger
// names ("refresh", or "refresh-fast" for 1 s). Nothing is asked while the tab is hidden or somebody paused, nor for a table under the pointer; charts
// listen for "tick" on document, once a second. When the server or the session is gone, the marker says so and what is shown stays.
const STATES = {
  live: "Live",
  paused: "Paused",
  fixed: "Fixed range",
  error: "Cannot reach the control plane: shown is the last answer. Routers serve on.",
};

// A table under the pointer is being read, or about to be clicked: it stays as it is until the pointer leaves.
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
  document.addEventListener("htmx:after:request", (event) => answered(event.detail.ctx, show));
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

function answered(ctx, show) {
  const raw = ctx?.response?.raw;
  if (!raw) return;
  if (raw.redirected && new URL(raw.url).pathname.startsWith("/accounts/")) location.reload();
  else if (ctx.sourceElement?.dataset.refresh && !paused) show(raw.ok ? "live" : "error");
}
