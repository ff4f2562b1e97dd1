// Keys: ? help, / search, g + letter to a page, p pause, t z undo a zoom, t c and t v copy and paste the time range. None
// of them applies while the user types.
const TOGETHER_MS = 1500;
const PAIRS = { tz: "zoomundo", tc: "rangecopy", tv: "rangepaste" };

export function startKeys() {
  const dialog = document.getElementById("keys");
  let lead = "", at = 0;
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && closeMenu()) return;
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || document.querySelector("dialog[open]")) return;
    const pair = Date.now() - at < TOGETHER_MS ? lead + event.key : "";
    lead = event.key;
    at = Date.now();
    if (event.key === "?") dialog?.showModal();
    else if (pair.length === 2 && pair[0] === "g") go(pair[1]);
    else if (pair in PAIRS) document.dispatchEvent(new Event(PAIRS[pair]));
    else if (event.key === "/") {
      event.preventDefault();
      document.dispatchEvent(new Event("searchopen"));
    }
    else if (event.key === "Escape") document.querySelector("[data-leave]")?.click();
    else if (event.key === "p") document.dispatchEvent(new Event("pausetoggle"));
  });
}

function closeMenu() {
  const menu = document.querySelector("body:not(:has(dialog[open])) .popover[open]");
  if (menu) menu.open = false;
  menu?.querySelector("summary").focus();
  return menu;
}

function go(key) {
  const link = document.querySelector(`[data-go="${CSS.escape(key)}"]`);
  if (link) location.assign(link.href);
}

function typing(element) {
  return element.closest?.("input, textarea, select, [contenteditable]") !== null;
}
