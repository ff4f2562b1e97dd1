// Refreshes the live parts of a page: an element with data-refresh="seconds" receives the event of its hx-trigger
// ("refresh", or "refresh-fast" for 1 s), and htmx requests it again. Nothing is refreshed while the tab is hidden or
// updates are paused (except data-always, the status strip), and no table under the pointer. Charts listen for "tick" on
// document, once a second. If the server is unreachable, the marker shows that and the page stays as it is.
import { isNotifying } from "./notify.js";

const STATES = {
  live: "Live",
  paused: "Paused",
  fixed: "Fixed range",
  error: "Control plane unreachable; the page is not up to date. Routers continue to serve.",
};

// A table under the pointer is being read or clicked, so it is not replaced until the pointer leaves it.
const POINTED = ":is(table, .events):hover";

// With notifications on, a hidden tab asks for the strip alone; browsers wake it about once a minute after a while.
const HIDDEN_MS = 15_000;

let paused = false, hiddenAt = 0;

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
    document.addEventListener("pausetoggle", () => marker && pause(!paused)); // a wall would not say that it is paused
  }
  document.addEventListener("visibilitychange", () => document.hidden || tick(1, true, fixed));
  document.addEventListener("htmx:after:swap", hideOwnLinks);
  hideOwnLinks();
  let seconds = 0;
  setInterval(() => tick(++seconds, false, fixed), 1000);
  document.addEventListener("htmx:after:request", (event) => onResponse(event.detail.ctx, show));
  document.addEventListener("htmx:error", (event) => {
    show("error");
    if (saysContact(event.detail.ctx)) showContact(false);
  });
  document.addEventListener("livestate", (event) => paused || fixed || show(event.detail));
}

// The strip, or without one, as on a shared wall, any part.
const saysContact = (ctx) => ctx?.sourceElement === (document.getElementById("status") ?? ctx?.sourceElement);

// On every page, also without a live part, a line says that the control plane does not respond.
function showContact(responds) {
  const line = document.getElementById("contact");
  if (line && line.hidden !== responds) {
    line.textContent = responds ? "" : STATES.error;
    line.hidden = responds;
  }
}

// An action of the strip that leads to the page that is shown is on that page already.
function hideOwnLinks() {
  for (const link of document.querySelectorAll("#status .actions a")) link.hidden = link.pathname === location.pathname;
}

function tick(seconds, now = false, fixed = false) {
  if (document.hidden) {
    if (!isNotifying() || Date.now() - hiddenAt < HIDDEN_MS) return;
    hiddenAt = Date.now();
    now = true;
  }
  const still = paused || fixed || document.hidden;
  if (!still) document.dispatchEvent(new CustomEvent("tick", { detail: { now } }));
  for (const element of document.querySelectorAll(still ? "[data-always]" : "[data-refresh]")) {
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
  else if (ctx.sourceElement?.dataset.refresh) {
    const responds = raw.ok || raw.status === 304;
    if (!paused) show(responds ? "live" : "error");
    if (saysContact(ctx)) showContact(responds);
    if (raw.status === 404 && "shared" in document.body.dataset) location.reload(); // the link ended
  }
}
