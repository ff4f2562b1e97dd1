// Keyboard shortcuts for the time range: t c copies it, t v opens a copied one, also from another tab. The clipboard holds
// {"from", "to"} as JSON; if it cannot be read, the copy in local storage is used.
import { writeClipboard, flashLabel } from "./copying.js";
import { instant, stamp, zoom } from "./view-state.js";
import { choice } from "./zone.js";

const STORAGE_KEY = "warmpath-range";

export function startTimeRange() {
  const bar = document.querySelector("[data-range-from]");
  if (!bar) return;
  document.addEventListener("rangecopy", () => copyRange(bar));
  document.addEventListener("rangepaste", () => pasteRange());
  const button = bar.querySelector("[data-copy-link]");
  button.hidden = false;
  button.addEventListener("click", async () => {
    await writeClipboard(viewUrl().href);
    flashLabel(button, "Copied");
  });
  const form = bar.querySelector("[data-short-link]");
  form.addEventListener("submit", () => (form.elements.view.value = viewUrl().pathname + viewUrl().search));
}

// The URL of the current view, with zoom and time zone.
function viewUrl() {
  const url = new URL(location.href);
  url.searchParams.set("tz", choice());
  return url;
}

async function copyRange(bar) {
  const [from, to] = zoom() ?? [bar.dataset.rangeFrom, bar.dataset.rangeTo];
  const text = JSON.stringify({ from: `${stamp(instant(from))}Z`, to: `${stamp(instant(to))}Z` });
  localStorage.setItem(STORAGE_KEY, text);
  await writeClipboard(text);
  flashLabel(bar.querySelector("[data-copy-link]"), "Range copied");
}

async function pasteRange() {
  const range = parsed(await readClipboard()) ?? parsed(localStorage.getItem(STORAGE_KEY));
  if (!range) return;
  const url = new URL(location.href);
  for (const name of ["range", "zoom"]) url.searchParams.delete(name);
  url.searchParams.set("from", stamp(instant(range.from)));
  url.searchParams.set("to", stamp(instant(range.to)));
  location.assign(url);
}

function parsed(text) {
  try {
    const range = JSON.parse(text);
    return instant(range.from) < instant(range.to) ? range : null;
  } catch {
    return null;
  }
}

async function readClipboard() {
  try {
    return await navigator.clipboard.readText();
  } catch {
    return "";
  }
}
